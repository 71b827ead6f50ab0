#include "signals.hpp"

#include <kolo.h>
#include <torch/csrc/utils/pybind.h>

#include <utility>

namespace py = pybind11;

namespace torch_kolo {

namespace {

thread_local std::exception_ptr raised;

// Called by kolo while the main thread waits. Exceptions must not leave it.
int32_t run_handlers(void*) {
  const py::gil_scoped_acquire locked;
  if (PyErr_CheckSignals() == 0) {
    return 0;
  }
  raised = std::make_exception_ptr(py::error_already_set());
  return 1;
}

int watch(void*) {
  kolo_set_wait_check(&run_handlers, nullptr);
  return 0;
}

} // namespace

void run_signal_handlers() {
  const auto threading = py::module_::import("threading");
  if (threading.attr("current_thread")().is(threading.attr("main_thread")())) {
    watch(nullptr);
  } else {
    // The main thread calls it.
    Py_AddPendingCall(&watch, nullptr);
  }
}

std::exception_ptr raised_by_handler() {
  return std::exchange(raised, nullptr);
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
    if (!error.matches(PyExc_Exception)) {
      raised = std::current_exception();
    }
  } catch (...) {
  }
}

} // namespace torch_kolo
