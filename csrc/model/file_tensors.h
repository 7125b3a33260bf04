// A file's tensors by name: each is required or optional, and any that a model does not use is refused.
#pragma once

#include <set>
#include <string>

#include "core/gguf.h"
#include "model/architecture.h"

namespace slimrt {

class FileTensors {
  public:
    FileTensors(const GgufFile& file, const ModelConfig& config) : file_(file), c_(config) {}

    bool has(const std::string& name) const { return file_.tensors().count(name) > 0; }
    /// The tensor, which is used from now on; none where it is Presence::never, or optional and missing.
    /// Throws Error{format} for a required one that is missing.
    const Tensor* find(const std::string& name, Presence presence);
    /// Throws Error{format} for a tensor of another shape.
    void require_shape(const std::string& name, const Tensor& t, int64_t rows, int64_t cols) const;
    /// Throws Error{unsupported} for a tensor that was not found and is none of those that any file may have:
    /// it might change what the model computes.
    void refuse_unused() const;

  private:
    std::set<std::string> fold_names() const;
    bool is_mtp(const std::string& name) const;

    const GgufFile& file_;
    const ModelConfig& c_;
    std::set<std::string> used_;
};

}  // namespace slimrt
