#include "core/notes.h"

#include <mutex>
#include <utility>

namespace slimrt {
namespace {

std::mutex mutex;
std::vector<std::string> notes;

}  // namespace

void add_note(std::string message) {
    const std::lock_guard lock(mutex);
    notes.push_back(std::move(message));
}

std::vector<std::string> take_notes() {
    const std::lock_guard lock(mutex);
    return std::exchange(notes, {});
}

}  // namespace slimrt
