#include "model/file_tensors.h"

#include "cache/cache_mode.h"
#include "core/error.h"
#include "model/weights.h"

namespace slimrt {

const Tensor* FileTensors::find(const std::string& name, Presence presence) {
    if (presence == Presence::never) return nullptr;
    const auto it = file_.tensors().find(name);
    if (it != file_.tensors().end()) {
        used_.insert(name);
        return &it->second;
    }
    if (presence == Presence::required)
        fail(ErrorCode::format, file_.path(), ": tensor '", name, "' is missing (architecture '",
             c_.architecture->name, "' needs it)");
    return nullptr;
}

void FileTensors::require_shape(const std::string& name, const Tensor& t, int64_t rows, int64_t cols) const {
    if (t.rows != rows || t.cols != cols)
        fail(ErrorCode::format, file_.path(), ": tensor '", name, "' is [", t.rows, ", ", t.cols,
             "], expected [", rows, ", ", cols, "] from the metadata");
}

/// Folded tensors of all modes: a file may hold those of modes that are not in use.
std::set<std::string> FileTensors::fold_names() const {
    std::set<std::string> names;
    for (int layer = 0; layer < c_.n_layers; ++layer)
        for (const bool cross : {false, true})
            for (const CacheMode* mode : cache_modes(cross))
                for (const Fold& fold : mode->folds(attention_config(c_, layer, cross)))
                    names.insert(block_prefix(c_, layer) + fold.suffix);
    return names;
}

/// Whether a tensor is of an MTP layer.
bool FileTensors::is_mtp(const std::string& name) const {
    for (int layer = c_.n_layers; layer < c_.n_layers + c_.n_mtp_layers; ++layer)
        if (name.starts_with(block_prefix(c_, layer))) return true;
    return false;
}

void FileTensors::refuse_unused() const {
    const std::set<std::string> folds = fold_names();
    for (const auto& [name, tensor] : file_.tensors()) {
        const bool known = used_.count(name) || folds.count(name) || name.starts_with("rope_") ||
                           name.ends_with(".attn_rot_embd") || name.starts_with("slimrt.") || is_mtp(name);
        if (!known)
            fail(ErrorCode::unsupported, file_.path(), ": tensor '", name, "' is not part of architecture '",
                 c_.architecture->name, "' as slimrt knows it");
    }
}

}  // namespace slimrt
