// Products of int8 codes, for the units compiled once per ISA. SLIMRT_DOT names the header that has, for one
// instruction set,
//   half_to_float(bits); store(Half*, Vec)
//   Codes                  64 codes of 8 bits: weights (unsigned) or activations (signed)
//   load_codes(p)          64 bytes; load_halves(p, q): 32 and 32; load_twice(p): 32, and the same again
//   load_nibbles(p, q)     low nibbles of 16 bytes, their high ones, and the same of q
//   fields(c, s, t, mask)  (c >> s) & mask in the first half, (c >> t) & mask in the second; above(c, d): c + 16 d
//   Sums, dot<wide>(s, w, x)  sums of products, in the order of the codes. Weights are below 64 or, when wide, come
//                          from wide(c), c signed, which adds wide_offset
//   start_halves(p), start_quarters(p)  2 (4) integers, each in one of the sums of its half (quarter), others 0
//   Acc, to_acc(Sums), halves(a, b), quarters(p)  floats for each of the sums, with fma, *, sum
//   add_eight(acc, a, b)   the products of 8 floats added to any of acc's
//   dot_rows               rows to multiply side by side
// and, for panels (see linear_panel.h)
//   PanelCodes, PanelSums, dot<wide>  `lanes` quadruples of codes and their sums; to_vec
//   load_panel(p); splat_four(p): 4 codes in all lanes; start_all(p): an integer in all
//   store_transposed(rows, to, stride)  quadruple q of Codes rows[r], r < lanes, to to + q * stride + 4 r
//   panel_vectors, panel_tokens  the register tile
#pragma once

#include "kernels/cpu/simd.h"

#include SLIMRT_DOT
