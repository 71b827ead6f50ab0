// The Python module.

#include <kolo.h>
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include "backend.hpp"
#include "hooks.hpp"
#include "signals.hpp"

namespace py = pybind11;
using torch_kolo::ProcessGroupKolo;

namespace {

c10::intrusive_ptr<ProcessGroupKolo> create(
    const c10d::DistributedBackendOptions& dist,
    const c10::intrusive_ptr<ProcessGroupKolo::Options>& given,
    const std::string& profiled_as) {
  auto options = given ? c10::make_intrusive<ProcessGroupKolo::Options>(*given) : c10::make_intrusive<ProcessGroupKolo::Options>();
  // The argument `timeout` wins over the one in the options. Without the argument, PyTorch passes
  // its default, and the options win. Python warns if both are given and differ.
  const auto argument = std::chrono::duration_cast<std::chrono::milliseconds>(dist.timeout);
  if (argument != kBackendDefaultTimeout || !given) {
    options->timeout = argument;
  }
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  options->enable_reconfigure |= dist.enable_reconfigure;
#endif
  options->profiled_as = profiled_as;
  options->group_name = dist.group_id;
  options->global_ranks_in_group.assign(dist.global_ranks_in_group.begin(), dist.global_ranks_in_group.end());
  return c10::make_intrusive<ProcessGroupKolo>(dist.store, dist.group_rank, dist.group_size, std::move(options));
}

py::dict stats(const ProcessGroupKolo& group) {
  const kolo_comm_stats_t stats = group.stats();
  py::dict device, all;
  device["whole"] = stats.device_whole;
  device["staged"] = stats.device_staged;
  device["in_place"] = stats.device_in_place;
  device["through_areas"] = stats.device_through_areas;
  device["one_shot"] = stats.device_one_shot;
  device["copied"] = stats.device_copied;
  all["device"] = device;
  return all;
}

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.attr("kolo_version") = kolo_version();
  py::class_<ProcessGroupKolo, c10::intrusive_ptr<ProcessGroupKolo>, c10d::Backend> group(module, "ProcessGroupKolo");
  group.def_property_readonly("has_devices", &ProcessGroupKolo::has_devices);
  group.def("stats", &stats);
  // Older versions of PyTorch have this for their own backends only.
  group.def_property_readonly("options", &ProcessGroupKolo::getBackendOptions);
  // Ranks outside a new group take no part, because kolo's groups find each other at the store.
  group.def("perform_nocolor_split", [](ProcessGroupKolo&, const py::object&) {});
  using Options = ProcessGroupKolo::Options;
  py::class_<Options, c10::intrusive_ptr<Options>, c10d::Backend::Options>(group, "Options")
      .def(py::init<std::chrono::milliseconds>(), py::arg("timeout") = kBackendDefaultTimeout)
      .def_readwrite("transport", &Options::transport)
      .def_readwrite("algorithm", &Options::algorithm)
      .def_readwrite("reproducible", &Options::reproducible)
      .def_readwrite("blocking_wait", &Options::blocking_wait);
  torch_kolo::run_signal_handlers();
  py::module_::import("atexit").attr("register")(py::cpp_function(&torch_kolo::Hooks::close_all));
  module.def("create", &create, py::arg("options"), py::arg("backend_options").none(true), py::arg("profiled_as") = "kolo",
      py::call_guard<py::gil_scoped_release>());
}
