// Switching stacks without system calls, and known to AddressSanitizer and ThreadSanitizer.
#include <sys/mman.h>

#include <cstring>

#include "cuda_host_fibers.h"
#include "cuda_host_races.h"

/// Saves what a call must keep and where it stands into *from, and goes on where `to` was saved.
extern "C" void cuda_host_switch(void** from, void* to);
#if defined(__x86_64__)
asm(R"(
.text
.globl cuda_host_switch
.type cuda_host_switch, @function
cuda_host_switch:
    push %rbp; push %rbx; push %r12; push %r13; push %r14; push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15; pop %r14; pop %r13; pop %r12; pop %rbx; pop %rbp
    ret
.size cuda_host_switch, . - cuda_host_switch
)");
constexpr size_t kSaved = 8,
                 kReturn = 6;  // words on the stack (the last keeps it aligned), the address there
#elif defined(__aarch64__)
asm(R"(
.text
.globl cuda_host_switch
.type cuda_host_switch, %function
cuda_host_switch:
    sub sp, sp, #160
    stp x19, x20, [sp]; stp x21, x22, [sp, #16]; stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]; stp x27, x28, [sp, #64]; stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]; stp d10, d11, [sp, #112]; stp d12, d13, [sp, #128]; stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp]; ldp x21, x22, [sp, #16]; ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]; ldp x27, x28, [sp, #64]; ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]; ldp d10, d11, [sp, #112]; ldp d12, d13, [sp, #128]; ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
.size cuda_host_switch, . - cuda_host_switch
)");
constexpr size_t kSaved = 20, kReturn = 11;
#endif

// Asked for by ThreadSanitizer: the first race ends the process.
extern "C" const char* __tsan_default_options() { return "halt_on_error=1"; }

// Only there under AddressSanitizer, which must know what is a stack.
extern "C" {
[[gnu::weak]] void __sanitizer_start_switch_fiber(void** fake, const void* bottom, size_t size);
[[gnu::weak]] void __sanitizer_finish_switch_fiber(void* fake, const void** bottom, size_t* size);
}

namespace cuda_host {
namespace {

constexpr size_t kStackBytes = 256 << 10, kPage = 4096;
// Stacks begin at different places of their pages: else all that run in turn would want the same few lines of
// caches.
constexpr size_t kApart = 17 * 64, kPlaces = 61;

void *host_saved, *host_fake, *host_known_as;
const void* host_bottom;
size_t host_size;
bool from_host;  // comes what runs now

/// In a fiber, who got here by a switch.
void arrive(void* fake) {
    if (!__sanitizer_finish_switch_fiber) return;
    __sanitizer_finish_switch_fiber(fake, from_host ? &host_bottom : nullptr,
                                    from_host ? &host_size : nullptr);
}

void leave(Fiber& fiber, void** fake) {
    races::become(host_known_as);
    if (__sanitizer_start_switch_fiber) __sanitizer_start_switch_fiber(fake, host_bottom, host_size);
    cuda_host_switch(&fiber.saved, host_saved);
}

}  // namespace

bool prepare(Fiber& fiber, void (*main)()) {
    if (fiber.stack == nullptr) {
        void* const memory = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED || mprotect(memory, kPage, PROT_NONE) != 0) return false;
        fiber.stack = memory;
        static size_t n_stacks = 0;
        fiber.unused = n_stacks++ % kPlaces * kApart;
        fiber.known_as = races::make_thread();
    }
    void** const words =
        static_cast<void**>(fiber.stack) + (kStackBytes - fiber.unused) / sizeof(void*) - kSaved;
    std::memset(words, 0, kSaved * sizeof(void*));
    words[kReturn] = reinterpret_cast<void*>(main);
    fiber.saved = words;
    return true;
}

void resume(Fiber& fiber) {
    from_host = true;
    host_known_as = races::this_thread();
    races::become(fiber.known_as);
    if (__sanitizer_start_switch_fiber) __sanitizer_start_switch_fiber(&host_fake, fiber.stack, kStackBytes);
    cuda_host_switch(&host_saved, fiber.saved);
    if (__sanitizer_finish_switch_fiber) __sanitizer_finish_switch_fiber(host_fake, nullptr, nullptr);
}

void started() { arrive(nullptr); }

void stop(Fiber& fiber) {
    leave(fiber, &fiber.fake);
    arrive(fiber.fake);
}

void stop_for(Fiber& fiber, Fiber& next) {
    from_host = false;
    races::become(next.known_as);
    if (__sanitizer_start_switch_fiber) __sanitizer_start_switch_fiber(&fiber.fake, next.stack, kStackBytes);
    cuda_host_switch(&fiber.saved, next.saved);
    arrive(fiber.fake);
}

void stop_for_good(Fiber& fiber) { leave(fiber, nullptr); }

}  // namespace cuda_host
