// The Python face of the reader; dejavu.kernels.flash checks arguments and words the errors.
#include "flash_bindings.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <system_error>

#include "crc32c.h"
#include "flash.h"
#include "flash_rate.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace dejavu {
namespace {

using Address = uintptr_t;

[[noreturn]] void raise_os_error(const std::system_error& error, const std::string& path) {
  errno = error.code().value();
  PyErr_SetFromErrnoWithFilename(PyExc_OSError, path.c_str());
  throw nb::python_error();
}

void make_reader(FlashReader* self, const std::string& path, int64_t start, int64_t size,
                 int64_t count, Address checksums,
                 std::tuple<uint64_t, uint64_t, int64_t, int64_t> stamp, int depth, bool direct,
                 bool uring, int64_t gap, int64_t max_read) {
  const auto [device, inode, bytes, modified] = stamp;
  try {
    new (self) FlashReader(path, {start, size, count, (const uint32_t*)checksums},
                           {device, inode, bytes, modified},
                           {depth, direct, uring, gap, max_read});
  } catch (const std::system_error& error) {
    raise_os_error(error, path);
  }
}

}  // namespace

void bind_flash(nb::module_& m) {
  m.def("crc32c", [](Address data, size_t bytes, uint32_t before) {
    const nb::gil_scoped_release release;
    return crc32c((const void*)data, bytes, before);
  }, "data"_a, "bytes"_a, "before"_a = 0);
  m.def("crc32c_portable", [](Address data, size_t bytes) {
    return crc32c_portable((const void*)data, bytes);
  });
  m.def("crc32c_blocks", [](Address data, size_t size, size_t count, Address out) {
    const nb::gil_scoped_release release;
    for (size_t i = 0; i < count; ++i)
      ((uint32_t*)out)[i] = crc32c((const uint8_t*)data + i * size, size);
  });

  m.def("read_rate", [](const std::string& path, Address offsets, int64_t count, int64_t size,
                        int depth, bool direct, bool uring, double seconds, int batch) {
    try {
      const nb::gil_scoped_release release;
      const Rate rate = read_rate(path, (const int64_t*)offsets, count, size, depth, direct, uring,
                                  seconds, batch);
      return std::make_tuple(rate.reads, rate.seconds, rate.direct);
    } catch (const std::system_error& error) {
      raise_os_error(error, path);
    }
  });

  nb::class_<FlashReader>(m, "FlashReader")
      .def("__init__", &make_reader)
      .def("submit",
           [](FlashReader& self, Address offsets, Address lengths, Address to, size_t count) {
             const nb::gil_scoped_release release;
             return self.submit((const int64_t*)offsets, (const int64_t*)lengths,
                                (const uint64_t*)to, count);
           })
      .def("wait",
           [](FlashReader& self, int64_t ticket) {
             const nb::gil_scoped_release release;
             const Outcome o = self.wait(ticket);
             return std::make_tuple((int)o.fault, o.error, o.offset);
           })
      .def("counters",
           [](FlashReader& self) {
             const Counters c = self.counters();
             return std::make_tuple(c.requests, c.bytes_wanted, c.bytes_read, c.reads,
                                    c.busy_seconds, c.wait_seconds, c.depth_seconds);
           })
      .def("reset_counters", &FlashReader::reset_counters)
      .def_prop_ro("direct", &FlashReader::direct)
      .def_prop_ro("backend", &FlashReader::backend)
      .def("fileno", &FlashReader::file);
}

}  // namespace dejavu
