#include "signals.hpp"

#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;

namespace torch_kolo {

namespace {

// Python's main thread, which alone runs handlers.
unsigned long main_thread = 0;

// pykolo's module. kolo asks one check while a thread waits, that of pykolo, which keeps the exceptions
// of handlers for pykolo's calls and for this backend's.
py::module_ signals() {
  return py::module_::import("pykolo._signals");
}

} // namespace

void run_signal_handlers() {
  main_thread = py::module_::import("threading").attr("main_thread")().attr("ident").cast<unsigned long>();
  signals().attr("run_signal_handlers")();
}

std::exception_ptr raised_by_handler() {
  if (PyThread_get_thread_ident() != main_thread) {
    return nullptr;
  }
  const py::gil_scoped_acquire locked;
  const py::object raised = signals().attr("raised_by_handler")();
  if (raised.is_none()) {
    return nullptr;
  }
  PyErr_SetObject(py::type::handle_of(raised).ptr(), raised.ptr());
  return std::make_exception_ptr(py::error_already_set());
}

void rethrow_of_handler() {
  if (auto exception = raised_by_handler()) {
    std::rethrow_exception(std::move(exception));
  }
}

void keep_of_handler() {
  try {
    throw;
  } catch (const py::error_already_set& error) {
    const py::gil_scoped_acquire locked;
    signals().attr("keep_of_handler")(error.value());
  } catch (...) {
  }
}

} // namespace torch_kolo
