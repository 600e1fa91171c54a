// The Python face: handles for what is registered once, raw addresses for the rest. native.py has
// checked dtype, shape and layout of everything and keeps it alive; nothing is checked again here.

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "flash_bindings.h"
#include "neuron_cache.h"
#include "neuron_cache_bindings.h"
#include "program.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace dejavu {
namespace {

using Address = uintptr_t;  // 0 is null

const KernelTable& table_named(const std::string& isa) {
  for (const KernelTable* table : available_tables())
    if (isa == table->isa) return *table;
  throw nb::value_error("this instruction set is not available");
}

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const KernelTable* table : available_tables()) names.push_back(table->isa);
  return names;
}

// Calls are appended and wait for run(), or run at once when eager.
class Recorder {
 public:
  Recorder(int threads, const std::string& isa, bool eager)
      : program_(table_named(isa), threads), eager_(eager) {}

  template <class Args>
  int call(const char* name, const Kernel<Args>& kernel, const Args& args,
           std::shared_ptr<void> keep = nullptr) {
    program_.add(name, kernel, args, std::move(keep));
    if (!eager_) return 0;
    const int fault = run();
    program_.clear();
    return fault;
  }

  int run() {
    const nb::gil_scoped_release release;
    return (int)program_.run();
  }

  std::vector<std::pair<std::string, double>> profile() {
    std::vector<double> seconds;
    {
      const nb::gil_scoped_release release;
      program_.run(&seconds);
    }
    const std::vector<std::string> names = program_.names();
    std::vector<std::pair<std::string, double>> times;
    for (size_t i = 0; i < names.size(); ++i) times.emplace_back(names[i], seconds[i]);
    return times;
  }

  const KernelTable& kernels() const { return program_.kernels(); }

 private:
  Program program_;
  bool eager_;
};

template <class T>
T* at(Address address) {
  return (T*)address;
}

}  // namespace
}  // namespace dejavu

NB_MODULE(_native, m) {
  using namespace dejavu;
  m.doc() = "Compiled CPU kernels; use them through dejavu.kernels.native.";

  nb::enum_<Dtype>(m, "Dtype")
      .value("fp32", Dtype::fp32)
      .value("bf16", Dtype::bf16)
      .value("int8", Dtype::int8);
  nb::enum_<Activation>(m, "Activation")
      .value("relu", Activation::relu)
      .value("relu2", Activation::relu2)
      .value("silu", Activation::silu)
      .value("gelu", Activation::gelu)
      .value("gelu_tanh", Activation::gelu_tanh)
      .value("fatrelu", Activation::fatrelu);
  nb::enum_<Fault>(m, "Fault")
      .value("none", Fault::none)
      .value("token_id", Fault::token_id)
      .value("position", Fault::position)
      .value("length", Fault::length)
      .value("block", Fault::block)
      .value("neurons", Fault::neurons);

  nb::class_<Matrix>(m, "Matrix")
      .def("__init__",
           [](Matrix* self, Address data, Address scale, Dtype dtype, Size rows, Size columns) {
             new (self) Matrix{at<void>(data), at<float>(scale), dtype, rows, columns};
           })
      .def("place",
           [](Matrix& self, Address places, Size stride) {
             self.places = at<int32_t>(places);
             self.stride = stride;
           },
           "Rows lie in slots: row i begins places[i] * stride elements from the data on.");
  nb::class_<Selection>(m, "Selection")
      .def("__init__", [](Selection* self, Size entries, Size tile, Address indices,
                          Address counts, Address mask, Address active) {
        new (self) Selection{entries, tile, at<int32_t>(indices), at<int32_t>(counts),
                             at<uint8_t>(mask), at<int64_t>(active)};
      });

  bind_flash(m);
  bind_neuron_cache(m);

  using Part = std::tuple<const Matrix*, Address, const Selection*, Address>;
  nb::class_<Recorder>(m, "Recorder")
      .def(nb::init<int, const std::string&, bool>(), "threads"_a, "isa"_a, "eager"_a)
      .def("run", &Recorder::run, "Run every recorded call in order; a Fault as int.")
      .def("profile", &Recorder::profile, "Run once; name and seconds of every call.")
      .def("embed",
           [](Recorder& self, Address ids, Size rows, const Matrix& table, Address out) {
             return self.call("embed", self.kernels().embed,
                              {at<int64_t>(ids), rows, &table, at<float>(out)});
           })
      .def("add",
           [](Recorder& self, Address x, Address y, Size size, Address out) {
             return self.call("add", self.kernels().add,
                              {at<float>(x), at<float>(y), size, at<float>(out)});
           })
      .def("layer_norm",
           [](Recorder& self, Address x, Address weight, Address bias, float eps, Size rows,
              Size width, Address out) {
             return self.call("layer_norm", self.kernels().layer_norm,
                              {at<float>(x), at<float>(weight), at<float>(bias), eps, rows, width,
                               at<float>(out)});
           })
      .def("rms_norm",
           [](Recorder& self, Address x, Address weight, float eps, Size rows, Size width,
              Address out) {
             return self.call("rms_norm", self.kernels().rms_norm,
                              {at<float>(x), at<float>(weight), nullptr, eps, rows, width,
                               at<float>(out)});
           })
      .def("linear",
           [](Recorder& self, Address x, Size rows, Size width, const nb::list& projections) {
             auto parts = std::make_shared<std::vector<LinearPart>>();
             for (nb::handle item : projections) {
               const auto [weight, bias, selection, out] = nb::cast<Part>(item);
               parts->push_back({weight, at<float>(bias), selection, at<float>(out)});
             }
             const LinearArgs args = {at<float>(x), rows, width, parts->data(),
                                      (Size)parts->size()};
             return self.call("linear", self.kernels().linear, args, parts);
           })
      .def("combine",
           [](Recorder& self, Address x, Size rows, const Matrix& weight, Address bias,
              Address residual, const Selection* selection, Size tile, Address out) {
             return self.call("combine", self.kernels().combine,
                              {at<float>(x), rows, &weight, at<float>(bias), at<float>(residual),
                               selection, tile, at<float>(out)});
           },
           nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg(),
           nb::arg())
      .def("mlp",
           [](Recorder& self, Address x, Size rows, const Matrix& up, const Matrix* gate,
              const Matrix& down, Address up_bias, Address gate_bias, Address down_bias,
              Address residual, Activation activation, float threshold,
              const Selection* selection, Size tile, Address out) {
             return self.call("mlp", self.kernels().mlp,
                              {at<float>(x), rows, &up, gate, &down, at<float>(up_bias),
                               at<float>(gate_bias), at<float>(down_bias), at<float>(residual),
                               activation, threshold, selection, tile, at<float>(out)});
           },
           nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg(), nb::arg(), nb::arg(),
           nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg(), nb::arg())
      .def("rope",
           [](Recorder& self, Address x, Address positions, Address cos, Address sin, Size rows,
              Size heads, Size head_dim, Size half, Size max_positions, Address out) {
             return self.call("rope", self.kernels().rope,
                              {at<float>(x), at<int64_t>(positions), at<float>(cos),
                               at<float>(sin), rows, heads, head_dim, half, max_positions,
                               at<float>(out)});
           })
      .def("attention",
           [](Recorder& self, Address q, Address k, Address v, Size rows, Size heads, Size groups,
              Size head_dim, Address keys, Address values, Dtype cache, Size blocks,
              Size block_size, Address block_table, Address lengths, Size max_blocks, float scale,
              Size window, const Selection* selection, Address out) {
             auto arrivals = std::make_shared<std::vector<int32_t>>((size_t)(rows * groups), 0);
             const AttentionArgs args = {
                 at<float>(q), at<float>(k), at<float>(v), rows, heads, groups, head_dim,
                 at<void>(keys), at<void>(values), cache, blocks, block_size,
                 at<int32_t>(block_table), at<int32_t>(lengths), max_blocks, scale, window,
                 selection, arrivals->data(), at<float>(out)};
             return self.call("attention", self.kernels().attention, args, arrivals);
           },
           nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
           nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
           nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg())
      .def("select",
           [](Recorder& self, Address x, Size rows, const Matrix& weight, Address bias,
              const Selection& out) {
             return self.call("select", self.kernels().select,
                              {at<float>(x), rows, &weight, at<float>(bias), out});
           })
      .def("select_signs",
           [](Recorder& self, Address x, Size rows, Size width, Address signs, Address thresholds,
              const Selection& out) {
             return self.call("select_signs", self.kernels().select_signs,
                              {at<float>(x), rows, width, at<uint64_t>(signs),
                               at<int32_t>(thresholds), out});
           })
      .def("select_nibbles",
           [](Recorder& self, Address x, Size rows, Size width, Size rank, Address first,
              Address second, Address scales, Address limits, const Selection& out) {
             return self.call("select_nibbles", self.kernels().select_nibbles,
                              {at<float>(x), rows, width, rank, at<uint8_t>(first),
                               at<uint8_t>(second), at<float>(scales), at<float>(limits), out});
           })
      .def("tally",
           [](Recorder& self, const Selection& selection, Size rows, Address counter) {
             return self.call("tally", self.kernels().tally,
                              {&selection, rows, at<int64_t>(counter)});
           })
      .def("choose",
           [](Recorder& self, Address x, Size rows, Address floors, Address positions,
              int64_t whole, const Selection& out, Address counter) {
             return self.call("choose", self.kernels().choose,
                              {at<float>(x), rows, at<float>(floors), at<int64_t>(positions), whole,
                               out, at<int64_t>(counter)});
           })
      .def("project",
           [](Recorder& self, Address x, Size rows, const Matrix& weight, Address bias,
              const Selection* selection, Size tile, bool gated, Activation activation,
              float threshold, const std::vector<std::pair<Size, Address>>& parts) {
             ProjectArgs args = {at<float>(x), rows, &weight, at<float>(bias), selection, tile,
                                 gated, activation, threshold, (Size)parts.size(), {}, {}};
             for (size_t part = 0; part < parts.size(); ++part) {
               args.widths[part] = parts[part].first;
               args.outs[part] = at<float>(parts[part].second);
             }
             return self.call("project", self.kernels().project, args);
           },
           nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg(), nb::arg(),
           nb::arg(), nb::arg(), nb::arg())
      .def("neurons",
           [](Recorder& self, NeuronCache& cache, NeuronStep step, Address layer,
              const Selection* selection) {
             return self.call("neurons", Kernel<NeuronArgs>{run_neurons, scratch_neurons},
                              {&cache, step, at<int64_t>(layer), selection});
           },
           nb::arg(), nb::arg(), nb::arg(), nb::arg().none())
      .def("argmax", [](Recorder& self, Address x, Size rows, Size width, Address out) {
        return self.call("argmax", self.kernels().argmax,
                         {at<float>(x), rows, width, at<int64_t>(out)});
      });

  m.attr("MAX_ROWS") = kMaxRows;
  m.def("available_isas", &available_isas, 
        "Instruction sets of this build and machine, best last.");
  m.def("use_large_pages",
        [](Address data, size_t bytes) { return use_large_pages(at<void>(data), bytes); });
  m.def(
      "read_bandwidth",
      [](Size bytes, int threads, int repeats) {
        const nb::gil_scoped_release release;
        return read_bandwidth(*available_tables().back(), bytes, threads, repeats);
      },
      "bytes"_a, "threads"_a, "repeats"_a, "GB/s of each pass of a streaming sum.");
}
