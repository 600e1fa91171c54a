#pragma once

#include <nanobind/nanobind.h>

namespace dejavu {

void bind_flash(nanobind::module_& m);

}  // namespace dejavu
