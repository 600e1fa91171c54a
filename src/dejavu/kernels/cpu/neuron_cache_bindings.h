#pragma once

#include <nanobind/nanobind.h>

namespace dejavu {

void bind_neuron_cache(nanobind::module_& m);

}  // namespace dejavu
