// A model in several files (shards), as gguf-split writes them: model-00001-of-00003.gguf and so on. The
// first has all metadata; each has its number and their count.
#include <cstdio>

#include "core/error.h"
#include "core/gguf.h"

namespace slimrt {
namespace {

/// The end of the file name of shard `number` (from 1).
std::string suffix(int64_t number, int64_t count) {
    char text[64];
    std::snprintf(text, sizeof text, "-%05lld-of-%05lld.gguf", static_cast<long long>(number),
                  static_cast<long long>(count));
    return text;
}

}  // namespace

/// The paths of all shards, of which this is the first; of a whole model its own.
std::vector<std::string> GgufFile::shard_paths() const {
    const int64_t count = n_shards(), number = integer("split.no", 0, 65535, 0) + 1;
    if (count <= 1) return {path_};
    const std::string own = suffix(number, count);
    if (!path_.ends_with(own)) {
        fail(ErrorCode::unsupported, path_, ": is shard ", number, " of ", count, ", whose names end with ",
             suffix(1, count), " and so on: give all of them their names back");
    }
    const std::string stem = path_.substr(0, path_.size() - own.size());
    if (number != 1) {
        fail(ErrorCode::unsupported, path_, ": is shard ", number, " of ", count, ": name the first, '", stem,
             suffix(1, count), "'");
    }
    std::vector<std::string> paths;
    for (int64_t i = 1; i <= count; ++i) paths.push_back(stem + suffix(i, count));
    return paths;
}

std::vector<std::string> GgufFile::paths() const {
    if (!file_) return {path_};
    std::vector<std::string> paths;
    for (const MappedFile::Part& part : file_->parts()) paths.push_back(part.path);
    return paths;
}

/// Takes the tensors of shard `number` (from 0).
void GgufFile::add_shard(const GgufFile& shard, int64_t number) {
    const auto no = shard.integer("split.no", 0, 65535), count = shard.integer("split.count", 0, 65535);
    if (no != number || count != n_shards()) {
        fail(ErrorCode::format, shard.path_, ": says that it is shard ", no + 1, " of ", count, ", not ",
             number + 1, " of ", n_shards(), ": get this file again");
    }
    const char* const architecture = "general.architecture";
    const std::string other = shard.string(architecture, ""), own = string(architecture, "");
    if (!other.empty() && other != own) {
        fail(ErrorCode::format, shard.path_, ": is a shard of another model ('", other, "', not '", own,
             "'): get this file again");
    }
    // Some writers align all shards as the first says, others each as it says itself.
    const int64_t aligned = alignment(), itself = shard.alignment();
    if (itself != aligned) {
        fail(ErrorCode::unsupported, shard.path_, ": key 'general.alignment' is ", itself,
             " (or left out), and the first shard's ", aligned,
             ", so that its data may begin at either: get the model in one file");
    }
    const auto offset = static_cast<size_t>(shard.bytes_.data() - bytes_.data());
    for (const auto& [name, tensor] : shard.tensors_) {
        if (!tensors_.emplace(name, tensor).second) {
            fail(ErrorCode::format, shard.path_, ": has tensor '", name,
                 "', which a shard before it has too: one of them is of another model; get this file again");
        }
    }
    for (const GgufTensorInfo& it : shard.tensor_list_) {
        tensor_list_.push_back(it);
        tensor_list_.back().position += offset;
    }
    bytes_ = {bytes_.data(), offset + shard.bytes_.size()};
}

GgufFile GgufFile::join(std::vector<GgufFile> shards) {
    GgufFile whole = std::move(shards.at(0));
    const char* const key = "split.tensors.count";
    const int64_t missing = -1, announced = whole.integer(key, 0, INT32_MAX, missing);
    for (size_t i = 1; i < shards.size(); ++i) {
        const int64_t other = shards[i].integer(key, 0, INT32_MAX, announced);
        if (announced != missing && other != announced) {
            fail(ErrorCode::format, shards[i].path_, ": is a shard of a model of ", other,
                 " tensors, not of ", announced, ": get this file again");
        }
        whole.add_shard(shards[i], static_cast<int64_t>(i));
    }
    const auto found = static_cast<int64_t>(whole.tensor_list_.size());
    if (announced != missing && found != announced) {
        fail(ErrorCode::format, whole.path_, ": key '", key, "' is ", announced, ", and its shards hold ",
             found, ": one of them is of another model; get all of them again");
    }
    return whole;
}

}  // namespace slimrt
