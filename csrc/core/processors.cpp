#include "core/processors.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <set>

#include "core/text_file.h"

#ifdef __linux__
#include <sched.h>
#elif defined(__APPLE__)
#include <pthread/qos.h>
#include <sys/sysctl.h>
#endif

namespace slimrt {
namespace {

constexpr double kMuchSlower = 0.6;
constexpr size_t kUnknownCache = size_t(32) << 20;

bool wanted() {
    const char* const said = std::getenv("SLIMRT_FAST_CORES");
    return !said || std::string(said) != "0";
}

#ifdef __linux__
/// The last-level cache of a processor: which processors share it, and its size ("32768K"); "" if unknown.
std::pair<std::string, std::string> last_cache(const std::string& cpu) {
    std::pair<std::string, std::string> found;
    for (int index = 0;; ++index) {
        const std::string cache = cpu + "/cache/index" + std::to_string(index);
        const std::string size = first_line(cache + "/size");
        if (size.empty()) return found;
        found = {first_line(cache + "/shared_cpu_list"), size};
    }
}

double relative_speed(const std::string& cpu) {
    for (const char* name : {"/cpu_capacity", "/cpufreq/cpuinfo_max_freq"})
        if (const std::string said = first_line(cpu + name); !said.empty()) return std::atof(said.c_str());
    return 1;
}

std::vector<int> allowed() {
    cpu_set_t set;
    CPU_ZERO(&set);
    std::vector<int> numbers;
    if (::sched_getaffinity(0, sizeof set, &set) != 0) return numbers;
    for (int i = 0; i < CPU_SETSIZE; ++i)
        if (CPU_ISSET(i, &set)) numbers.push_back(i);
    return numbers;
}

bool keep_to(const std::vector<int>& cpus) {
    cpu_set_t set;
    CPU_ZERO(&set);
    for (const int cpu : cpus) CPU_SET(cpu, &set);
    return ::sched_setaffinity(0, sizeof set, &set) == 0;
}
#endif

}  // namespace

int count_cores(const std::vector<Processor>& of) {
    std::set<std::string> cores;
    for (const Processor& one : of) cores.insert(one.core);
    return static_cast<int>(cores.size());
}

std::vector<Processor> fast_ones(std::vector<Processor> all) {
    double fastest = 0;
    for (const Processor& one : all) fastest = std::max(fastest, one.speed);
    std::erase_if(all, [&](const Processor& one) { return one.speed < kMuchSlower * fastest; });
    return all;
}

#ifdef __linux__
std::vector<Processor> processors(const std::string& sysfs) {
    std::vector<Processor> found;
    for (const int number : allowed()) {
        const std::string cpu = sysfs + "/cpu" + std::to_string(number);
        std::string core = first_line(cpu + "/topology/thread_siblings_list");
        if (core.empty()) core = std::to_string(number);
        found.push_back({number, core, relative_speed(cpu)});
    }
    return found;
}

size_t cache_bytes(const std::string& sysfs) {
    std::map<std::string, std::string> caches;
    for (const Processor& one : processors(sysfs))
        caches.insert(last_cache(sysfs + "/cpu" + std::to_string(one.number)));
    size_t bytes = 0;
    for (const auto& [shared_by, size] : caches)
        bytes += std::strtoull(size.c_str(), nullptr, 10) << (size.ends_with("M") ? 20 : 10);
    return bytes ? bytes : kUnknownCache;
}

namespace {

const std::vector<Processor>& known_fast_ones() {
    static const std::vector<Processor> fast = fast_ones(processors());  // reads many small files
    return fast;
}

}  // namespace

OnFastCores::OnFastCores(int n_threads) : OnFastCores(n_threads, known_fast_ones()) {}

OnFastCores::OnFastCores(int n_threads, const std::vector<Processor>& fast) {
    if (!wanted() || n_threads > count_cores(fast)) return;
    std::vector<int> cpus, before = allowed();
    for (const Processor& one : fast)
        if (std::ranges::find(before, one.number) != before.end()) cpus.push_back(one.number);
    if (!cpus.empty() && cpus.size() < before.size() && keep_to(cpus)) before_ = std::move(before);
}

OnFastCores::~OnFastCores() {
    if (!before_.empty()) keep_to(before_);
}
#elif defined(__APPLE__)
std::vector<Processor> processors(const std::string&) {
    std::vector<Processor> found;
    for (const char* name : {"hw.perflevel0.physicalcpu", "hw.physicalcpu"}) {  // older systems have one kind
        int cores = 0;
        size_t bytes = sizeof cores;
        if (!found.empty() || ::sysctlbyname(name, &cores, &bytes, nullptr, 0) != 0) continue;
        for (int i = 0; i < cores; ++i) found.push_back({i, std::to_string(i), 1});
    }
    return found;
}

size_t cache_bytes(const std::string&) { return kUnknownCache; }

OnFastCores::OnFastCores(int n_threads) : OnFastCores(n_threads, {}) {}
OnFastCores::OnFastCores(int, const std::vector<Processor>&) {
    if (wanted()) ::pthread_set_qos_class_self_np(QOS_CLASS_USER_INITIATED, 0);
}
OnFastCores::~OnFastCores() = default;
#else
std::vector<Processor> processors(const std::string&) { return {}; }
size_t cache_bytes(const std::string&) { return kUnknownCache; }
OnFastCores::OnFastCores(int) {}
OnFastCores::OnFastCores(int, const std::vector<Processor>&) {}
OnFastCores::~OnFastCores() = default;
#endif

}  // namespace slimrt
