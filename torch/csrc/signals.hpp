// Python's signal handlers, which run while the main thread waits for other ranks.

#pragma once

#include <exception>

namespace torch_kolo {

// Has kolo run the handlers when Python's main thread waits. Python runs them nowhere else. The
// caller holds Python's lock.
void run_signal_handlers();

// Returns the exception of a handler that has ended a wait of this thread, once; otherwise none.
std::exception_ptr raised_by_handler();

// As `raised_by_handler`, but throws it.
void rethrow_of_handler();

// Keeps the current exception for `raised_by_handler`, if it is one of Python's that ends a program.
void keep_of_handler();

} // namespace torch_kolo
