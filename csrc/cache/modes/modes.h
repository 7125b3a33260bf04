// The registered modes.
#pragma once

#include "cache/cache_mode.h"

namespace slimrt {

const CacheMode* kv_mode();
const CacheMode* kivi_mode();
const CacheMode* latent_mode();
const CacheMode* lowrank_mode();
const CacheMode* k_mode();
const CacheMode* kr_mode();
const CacheMode* v_mode();
const CacheMode* x_mode();
const CacheMode* xr_mode();
const CacheMode* e_mode();
const CacheMode* e1_mode();

}  // namespace slimrt
