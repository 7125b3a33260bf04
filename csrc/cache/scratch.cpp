#include "cache/scratch.h"

#include "core/error.h"

namespace slimrt {

void Scratch::fail_overflow() const {
    fail(ErrorCode::wont_fit, "a step needs ", used_, " bytes of scratch and ", buffer_.bytes,
         " were planned: this is a bug in slimrt's planner, please report it with the model and the options");
}

}  // namespace slimrt
