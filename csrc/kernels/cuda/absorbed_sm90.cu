// Absorbed decode attention on sm_90a: a team is a thread block cluster. Rows are loaded by bulk copies
// (TMA). Weights and partial scores are stored asynchronously in the other blocks' shared memory, where
// mbarriers count the bytes. The receiver sets the number of expected bytes once a phase, so that neither
// side needs a fence.
#include "kernels/cuda/absorbed.h"
#include "kernels/cuda/absorbed_kernel.cuh"
#include "kernels/cuda/ptx_sm90.cuh"
#include "kernels/cuda/tensor_map.h"

namespace slimrt::cuda {
namespace {

struct Cluster {
    static constexpr bool kBoxes = true;         // rows may be loaded as panels
    static constexpr bool kOneWarpLoads = true;  // asynchronously: a barrier counts the bytes
    static constexpr int kWeightArrivals = 0;    // beside those of scores_done()

    const int number, rank;
    uint64_t *const arrived, *const parts;

    __device__ Cluster(const Absorbed& x, const Barriers& barriers)
        : number(static_cast<int>(blockIdx.y) * x.splits + static_cast<int>(blockIdx.x) / x.team),
          rank(static_cast<int>(cluster_rank())),
          arrived(barriers.arrived),
          parts(barriers.parts) {}

    static Shape shape(const Absorbed& x) {
        return {.grid = dim3(x.team * x.splits, x.sequences), .cluster = static_cast<unsigned>(x.team)};
    }
    static __device__ void begin() {
        barrier_init_done();
        cluster_sync();
    }
    static __device__ void end() {
        cluster_sync();
    }  // other blocks may still write to this one's shared memory
    /// Orders this thread's writes before bulk copies to the same place, once others know of them.
    static __device__ void before_copies() { fence_copies(); }
    static __device__ void wait(uint64_t* barrier, uint32_t parity) { barrier_wait_block(barrier, parity); }

    /// Loads a slice of all rows, if one copy can: the engine takes some 45 cycles for each copy, even of 256
    /// bytes.
    static __device__ void load_at_once(const Absorbed& x, int rank, const TileSource& source,
                                        unsigned char* to, uint64_t* full) {
        const AbsorbedPlane& plane = x.rows;
        if (!plane.panels) {
            copy_bulk(to + plane.raw, source.rows + rank * plane.slice_bytes, plane.slice_bytes, full);
            return;
        }
        const int head = plane.by_heads ? rank * plane.pieces : 0;
        const int panel = plane.by_heads ? 0 : rank * (plane.slice / kPanelColumns);
        copy_box(to + plane.tile, &x.boxes, {0, 0, panel, head, static_cast<int>(source.block)}, full);
    }
    /// Bulk copies are issued one lane after another, so each lane has a row.
    static __device__ void load_tile(const Absorbed& x, int rank, const TileSource& source, int, int,
                                     unsigned char* to, uint64_t* full, int lane) {
        static_assert(kTileTokens == 32);
        unsigned bytes = 0;
        copy_slice(x, rank, source, lane, [&](int, const void*, int n) { bytes += n; });
        for (int i = 16; i > 0; i /= 2) bytes += __shfl_xor_sync(~0u, bytes, i);
        if (x.rows.at_once) bytes += x.rows.panels ? 2 * kTileTokens * x.rows.slice : x.rows.slice_bytes;
        if (lane == 0) barrier_arrive_expect(full, bytes);
        __syncwarp();
        if (x.rows.at_once && lane == 0) load_at_once(x, rank, source, to, full);
        copy_slice(x, rank, source, lane,
                   [&](int at, const void* from, int n) { copy_bulk(to + at, from, n, full); });
    }

    __device__ void send_weights(const Absorbed& x, const Ring& slot, int head, uint32_t pair, float shrink,
                                 int lane) const {
        uint4 words;  // lane 4 i + c sends rows [8 c, 8 c + 8) to blocks i, i + 8 ...
        words.x = __shfl_sync(~0u, pair, lane % 4 * 8);
        words.y = __shfl_sync(~0u, pair, lane % 4 * 8 + 2);
        words.z = __shfl_sync(~0u, pair, lane % 4 * 8 + 4);
        words.w = __shfl_sync(~0u, pair, lane % 4 * 8 + 6);
        const WeightSlot to(x, slot.at);
        auto* const chunk = reinterpret_cast<uint4*>(to.weights + head * kWeightStride) + lane % 4;
        uint64_t* const barrier = arrived + slot.at;
        for (int block = lane / 4; block < x.team; block += 8) store_async(chunk, words, barrier, block);
        if (lane < x.team) store_async(to.shrink + head, __float_as_uint(shrink), barrier, lane);
    }
    /// Expects the weights of so many heads, of which some may be there already; and tells that the warps
    /// which this one speaks for have read and converted the tile, which product warps read and load anew.
    __device__ void scores_done(const Ring& slot, int heads) const {
        constexpr int kBytes = kTileTokens * 2 + sizeof(float);  // of a head
        barrier_arrive_expect(arrived + slot.at, heads * kBytes);
    }
    template <int kHeads>
    __device__ void fetch_weights(const Absorbed&, const Ring&, int, int) const {}  // they are stored here

    __device__ float* own_parts(const Absorbed& x, int slot) const {
        return reinterpret_cast<float*>(shared_memory() + x.at.parts) + slot * x.n_heads * kTileTokens;
    }
    __device__ void send_part(const Absorbed& x, int slot, int owner, int at, const float4& sum) const {
        const uint4 words = {__float_as_uint(sum.x), __float_as_uint(sum.y), __float_as_uint(sum.z),
                             __float_as_uint(sum.w)};
        store_async(own_parts(x, slot) + at, words, parts + slot, owner);
    }
    __device__ void parts_sent(const Absorbed&, int, int) const {}  // each store counts itself
    __device__ void wait_parts(const Absorbed& x, const Ring& slot, const WarpPlace& place) const {
        const int heads = max(0, min(x.own_heads, x.n_heads - rank * x.own_heads));
        const int bytes = x.team * heads * kTileTokens * int(sizeof(float));
        if (place.warp == 0 && place.lane == 0) barrier_arrive_expect(parts + slot.at, bytes);
        wait(parts + slot.at, slot.parity());
    }
};

/// A tile's slice as one TMA box: 128 bytes of a row, rows, panels of a stored head, heads, cache blocks.
CUtensorMap boxes_of(const AbsorbedPlane& plane) {
    constexpr uint64_t kBlocks = uint64_t{1} << 31;  // at most: only block tables know how many there are
    const RowsView& rows = plane.rows;
    const auto panels = [](int columns) { return static_cast<unsigned>(columns / kPanelColumns); };
    return tensor_map(
        {rows.base,
         {kPanelRow, kTileTokens, panels(rows.head_dim), unsigned(plane.width / rows.head_dim), kBlocks},
         {unsigned(rows.head_elements), kPanelRow, rows.head_block, rows.block_stride},
         {kPanelRow, kTileTokens, panels(plane.piece), unsigned(plane.pieces), 1}});
}

}  // namespace

void absorbed_clusters(const Device& device, const Absorbed& x) {
    Absorbed some = x;
    if (x.rows.panels) some.boxes = boxes_of(x.rows);
    start_team<Cluster>(device, some);
}

/// By driver and device: the GPCs of devices differ, and MIG instances have parts of them.
void ask_for_clusters(Device& device) {
    if (device.capability != kClusterCapability) return;
    const auto* const kernel =
        reinterpret_cast<const void*>(absorbed_kernel<Cluster, Bf16Operand, 1, 5, false>);
    allow(device.id, kernel, device.shared_bytes, true);
    for (unsigned size = 1; size <= kMaxCluster; ++size) {
        cudaLaunchAttribute cluster{};
        cluster.id = cudaLaunchAttributeClusterDimension;
        cluster.val.clusterDim = {size, 1, 1};
        cudaLaunchConfig_t config{};
        config.gridDim = dim3(size * unsigned(device.processors));
        config.blockDim = dim3(kThreads<1>);
        config.dynamicSmemBytes = device.shared_bytes;
        config.attrs = &cluster;
        config.numAttrs = 1;
        int& most = device.clusters[size];
        if (cudaOccupancyMaxActiveClusters(&most, kernel, &config) == cudaSuccess) continue;
        cudaGetLastError();  // none fits
        most = 0;
    }
}

}  // namespace slimrt::cuda
