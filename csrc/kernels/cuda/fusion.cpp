#include "kernels/cuda/fusion.h"

#include <algorithm>
#include <utility>

namespace slimrt::cuda {
namespace {

bool same(const Tensor& a, const Tensor& b) {
    return a.data == b.data && a.rows == b.rows && a.cols == b.cols && a.stride == b.stride;
}

/// Conservative: by the bytes from the first to the last.
bool overlap(const Tensor& a, const Tensor& b) {
    return a.data < b.data + b.bytes() && b.data < a.data + a.bytes();
}

bool independent(const StepRows& a, const StepRows& b) {
    const bool same_plane = a.slots && b.slots && a.slots->base == b.slots->base;
    return a.x.rows == b.x.rows && !overlap(a.x, b.x) && !same_plane;
}

}  // namespace

void Fusion::end() {
    start();
    active_ = false;
}

void Fusion::drop() {
    pending_ = {};
    active_ = false;
}

Around Fusion::Products::around() const {
    Around around{.sum = sum};
    if (normed) around.norm = &normed->norm, around.normed = normed->x;
    return around;
}

void Fusion::start() {
    const auto pending = std::exchange(pending_, {});
    if (const auto* const normed = std::get_if<Normed>(&pending))
        cuda::norm(device_, normed->x, normed->norm);
    if (const auto* const products = std::get_if<Products>(&pending)) {
        const auto& [x, all, workspace, normed, sum] = *products;
        if ((normed || sum) && linear_around(device_, x, all, products->around())) return;
        if (normed) cuda::norm(device_, normed->x, normed->norm);
        cuda::linear(device_, x, 1, all, workspace);
        if (sum) cuda::add(device_, sum, all[0].out);
    }
    if (const auto* const sum = std::get_if<Sum>(&pending)) cuda::add(device_, sum->x, sum->y);
    if (const auto* const rows = std::get_if<Rows>(&pending)) step_rows(device_, *rows);
}

/// Products may compute a pending norm themselves. Their blocks then read the norm's input at any time, so no
/// product may be written there.
void Fusion::linear(Tensor x, std::span<const Product> products, std::byte* workspace) {
    const auto* const pending = std::get_if<Normed>(&pending_);
    const auto beside = [&](const Product& p) { return !overlap(p.out, pending->x); };
    std::optional<Normed> normed;
    if (pending && same(pending->norm.out, x) && std::ranges::all_of(products, beside)) {
        normed = *pending;
        pending_ = {};
    }
    start();
    if (!active_) return cuda::linear(device_, x, 1, products, workspace);
    pending_ = Products{x, {products.begin(), products.end()}, workspace, std::move(normed), {}};
}

/// A gate and its up-projection may be two products of one kernel.
void Fusion::gate(Activation kind, Tensor gate, Tensor up) {
    if (const auto* const products = std::get_if<Products>(&pending_)) {
        const auto& all = products->all;
        const auto product_of = [&](const Tensor& out) {
            return std::ranges::find_if(all, [&](const Product& p) { return same(p.out, out); });
        };
        const auto of_gate = product_of(gate), of_up = product_of(up);
        if (all.size() == 2 && !products->sum && of_gate != all.end() && of_up != all.end() &&
            of_gate != of_up) {
            const Product both[] = {*of_gate, *of_up};
            Around around = products->around();
            around.gate = &kind;
            if (linear_around(device_, products->x, both, around)) {
                pending_ = {};
                return;
            }
        }
    }
    start();
    cuda::gate(device_, kind, gate, up);
}

/// A residual add may follow its product in the same kernel.
void Fusion::add(Tensor x, Tensor y) {
    auto* const products = std::get_if<Products>(&pending_);
    const bool row_by_row = x.rows == y.rows;  // else y is one row for all
    if (products && row_by_row && !products->sum && products->all.size() == 1 &&
        same(products->all[0].out, y) && !overlap(products->x, x) && !overlap(y, x) &&
        !(products->normed && overlap(products->normed->x, x))) {
        products->sum = x;
        return;
    }
    start();
    if (!active_ || !row_by_row) return cuda::add(device_, x, y);
    pending_ = Sum{x, y};
}

/// A pending sum is normed by the kernel that adds it; else the norm waits for products that may compute it.
void Fusion::norm(Tensor x, const Norm& norm) {
    if (const auto* const products = std::get_if<Products>(&pending_); products && products->sum) {
        const auto own = *products;
        pending_ = {};
        if (!linear_around(device_, own.x, own.all, own.around())) {
            if (own.normed) cuda::norm(device_, own.normed->x, own.normed->norm);
            cuda::linear(device_, own.x, 1, own.all, own.workspace);
            pending_ = Sum{own.sum, own.all[0].out};
        }
    }
    const auto* const sum = std::get_if<Sum>(&pending_);
    if (sum && same(sum->x, x) && (!overlap(sum->y, norm.out) || same(sum->y, norm.out))) {
        const Tensor more = sum->y;
        pending_ = {};
        return cuda::norm(device_, x, norm, more);
    }
    start();
    if (!active_ || overlap(x, norm.out)) return cuda::norm(device_, x, norm);
    pending_ = Normed{x, norm};
}

void Fusion::rope(Tensor x, int n_heads, const Rope& rope, Tensor positions) {
    if (!active_) return cuda::rope(device_, x, n_heads, rope, positions);
    defer({x, n_heads, rope, positions, {}});
}

/// Rows that were just rotated are stored by the same kernel.
void Fusion::store(Tensor x, const Slots& slots) {
    if (!active_) return cuda::store(device_, x, slots);
    if (auto* const rows = std::get_if<Rows>(&pending_)) {
        const auto of_x = std::ranges::find_if(
            *rows, [&](const StepRows& r) { return same(r.x, x) && r.n_heads == slots.heads && !r.slots; });
        const auto other_plane = [&](const StepRows& r) { return !r.slots || r.slots->base != slots.base; };
        if (of_x != rows->end() && std::ranges::all_of(*rows, other_plane)) {
            of_x->slots = slots;
            return;
        }
    }
    defer({x, slots.heads, {}, {}, slots});
}

void Fusion::defer(StepRows own) {
    const auto free_of = [&](const StepRows& other) { return independent(own, other); };
    const auto* const rows = std::get_if<Rows>(&pending_);
    if (!rows || rows->size() == kMaxStepRows || !std::ranges::all_of(*rows, free_of)) {
        start();
        pending_ = Rows{};
    }
    std::get<Rows>(pending_).push_back(std::move(own));
}

}  // namespace slimrt::cuda
