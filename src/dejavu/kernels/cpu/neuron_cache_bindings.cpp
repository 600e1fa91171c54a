// The Python face of the neuron cache; dejavu.kernels.neuron_cache checks what comes in.
#include "neuron_cache_bindings.h"

#include <nanobind/stl/tuple.h>

#include "neuron_cache.h"

namespace nb = nanobind;

namespace dejavu {
namespace {

using Address = uintptr_t;

}  // namespace

void bind_neuron_cache(nb::module_& m) {
  nb::enum_<NeuronStep>(m, "NeuronStep")
      .value("begin", NeuronStep::begin)
      .value("finish", NeuronStep::finish)
      .value("start", NeuronStep::start)
      .value("release", NeuronStep::release);
  nb::class_<NeuronCache>(m, "NeuronCache")
      .def("__init__",
           [](NeuronCache* self, FlashReader& reader, const nb::object& /* keeps the memory */,
              Address arena, Size slots, Size record, Size layers, Address first, Address offsets,
              Address places, double half_life) {
             new (self) NeuronCache(reader, (uint8_t*)arena, slots, record, layers,
                                    (const int64_t*)first, (const int64_t*)offsets,
                                    (int32_t*)places, half_life);
           },
           nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>())
      .def("begin",
           [](NeuronCache& self, Size layer, const Selection* selection) {
             const nb::gil_scoped_release release;
             return self.begin(layer, selection);
           },
           nb::arg(), nb::arg().none())
      .def("finish",
           [](NeuronCache& self, Size layer) {
             const nb::gil_scoped_release release;
             const Outcome o = self.finish(layer);
             return std::make_tuple((int)o.fault, o.error, o.offset);
           })
      .def("release", &NeuronCache::release)
      .def("take_failure",
           [](NeuronCache& self) {
             const StepFailure f = self.take_failure();
             return std::make_tuple((int)f.outcome.fault, f.outcome.error, f.outcome.offset,
                                    f.crowded);
           })
      .def("pin",
           [](NeuronCache& self, Address neurons, Size count) {
             self.pin((const int64_t*)neurons, count);
           })
      .def("counters",
           [](const NeuronCache& self) {
             const CacheCounters c = self.counters();
             return std::make_tuple(c.wanted, c.missed);
           })
      .def("reset_counters", &NeuronCache::reset_counters);
}

}  // namespace dejavu
