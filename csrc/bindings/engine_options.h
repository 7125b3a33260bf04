// Engine options from Python's arguments, and what an engine says of itself as dictionaries.
#pragma once

#include <any>

#include "bindings/bindings.h"
#include "engine/engine.h"

namespace slimrt {

/// Throws TypeError for unknown arguments and for those of a wrong type.
EngineOptions read_options(const nb::kwargs& args);
/// Tensors by name, of float16 or float32; `keep` holds the arrays that they are views of.
ExtraTensors read_extra(const nb::handle& derived, std::vector<std::any>& keep);

void put_memory(nb::dict& d, const MemoryReport& m);
void put_info(nb::dict& d, const EngineInfo& info);

}  // namespace slimrt
