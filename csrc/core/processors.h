// The CPUs of this machine, some of which may be much slower than others (big.LITTLE).
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace slimrt {

struct Processor {
    int number;
    std::string core;  // the same for hardware threads of one core
    double speed;      // relative to other processors; 1 where the system does not say
};

/// The processors this thread may run on (macOS: those of the fastest kind); none where the system does not
/// say. sysfs: where Linux describes them.
std::vector<Processor> processors(const std::string& sysfs = "/sys/devices/system/cpu");

int count_cores(const std::vector<Processor>& of);

/// The processors without those of much slower cores (RK3588: the four A76 without the four A55).
std::vector<Processor> fast_ones(std::vector<Processor> all);

/// While it lives, the calling thread is bound to the fast cores of a machine that has slow ones too: a
/// thread on a slow core delays all others. No effect where all cores are alike, n_threads exceeds the fast
/// cores, the user chose CPUs of one kind (taskset), or SLIMRT_FAST_CORES is 0. On macOS it sets the QoS
/// class of the thread, permanently.
class OnFastCores {
  public:
    explicit OnFastCores(int n_threads);
    /// fast: the fast processors of this machine.
    OnFastCores(int n_threads, const std::vector<Processor>& fast);
    ~OnFastCores();
    OnFastCores(const OnFastCores&) = delete;
    OnFastCores& operator=(const OnFastCores&) = delete;

  private:
    std::vector<int> before_;  // the affinity to restore; empty: it was not changed
};

/// Bytes of all last-level caches of these processors together; where the system does not say, a size that
/// few exceed.
size_t cache_bytes(const std::string& sysfs = "/sys/devices/system/cpu");

/// The default number of threads: physical (big) cores this process may run on, within its CPU quota; at
/// least 1.
int default_threads();

}  // namespace slimrt
