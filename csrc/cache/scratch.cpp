#include "cache/scratch.h"

#include "core/error.h"

namespace slimrt {

void Scratch::fail_overflow() const {
    fail(ErrorCode::wont_fit, "a step needs ", arena_->used[0] + arena_->used[1], " bytes of scratch and ",
         arena_->buffer.bytes,
         " were planned: this is a bug in slimrt's planner, please report it with the model and the options");
}

}  // namespace slimrt
