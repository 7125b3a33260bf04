// The CPUs of this machine, of which some may be much slower than others.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace slimrt {

struct Processor {
    int number;
    std::string core;  // the same for hardware threads of one core
    double speed;      // beside its neighbours'; 1 where the system does not say
};

/// Those that this thread may run on (macOS: those of the fastest kind); none where the system does not tell.
/// sysfs: where Linux describes them.
std::vector<Processor> processors(const std::string& sysfs = "/sys/devices/system/cpu");

int count_cores(const std::vector<Processor>& of);

/// Without those of cores much slower than the fastest one (RK3588: four A76 without its four A55).
std::vector<Processor> fast_ones(std::vector<Processor> all);

/// While it lives, the calling thread keeps to the fast cores of a machine that has slow ones too: a slow
/// core that takes part holds up the others. Does nothing where all are alike, where n_threads are more than
/// there are fast cores, where the user chose CPUs of one kind (taskset), and where SLIMRT_FAST_CORES is 0.
/// On macOS, which places threads by what they are good for: says that somebody waits for this one, for good.
class OnFastCores {
  public:
    explicit OnFastCores(int n_threads);
    /// fast: those there are.
    OnFastCores(int n_threads, const std::vector<Processor>& fast);
    ~OnFastCores();
    OnFastCores(const OnFastCores&) = delete;
    OnFastCores& operator=(const OnFastCores&) = delete;

  private:
    std::vector<int> before_;  // CPUs to give back; none: nothing was changed
};

/// Bytes that the last-level caches of these processors hold together; where the system does not tell, a size
/// that few exceed.
size_t cache_bytes(const std::string& sysfs = "/sys/devices/system/cpu");

/// Threads that compute well side by side on this machine: physical (big) cores this process may run on,
/// within its CPU quota; at least 1.
int default_threads();

}  // namespace slimrt
