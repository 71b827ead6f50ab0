// The kernels of `cuda-kernels`, compiled as C++ for the fake driver: a kernel runs as one block of one
// thread. The driver says where device memory is on the host.

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include <dlfcn.h>

#include "../../cuda-kernels/host.h"

#include "../../cuda-kernels/elements.cu"

#include "../../cuda-kernels/barrier.cu"

#include "../../cuda-kernels/reduce.cu"

#include "../../cuda-kernels/scale.cu"

#include "../../cuda-kernels/entries.cu"

namespace {

// A kernel: a reduction, a scaling between two types, or the one that takes moves.
struct Function {
    void (*reduce)(Parameter);
    void (*scale)(ScaleParameter);
    void (*take)(TakeParameter);
    // Bytes of an element of the sources and of the targets.
    size_t from, to;
};

// The memory of the driver: returns the host's address, or null if there is no such memory.
struct Memory {
    char *(*resolve)(void *driver, u64 address, size_t len);
    void *driver;

    // Replaces a device address by the host's.
    template <class T> bool find(T *&address, size_t len) const {
        address = reinterpret_cast<T *>(resolve(driver, reinterpret_cast<uintptr_t>(address), len));
        return address;
    }
};

void run_scaling(const Function *function, ScaleParameter parameter, const Memory &memory) {
    if (parameter.count == 0) {
        return;
    }
    if (memory.find(parameter.source, parameter.count * function->from) && memory.find(parameter.target, parameter.count * function->to)) {
        function->scale(parameter);
    }
}

// Replaces the addresses of a barrier by the host's. Returns false if one is wrong.
bool find(Barrier *barrier, const Memory &memory) {
    bool is_there = memory.find(barrier->own, MOST * FLAG_WORDS * sizeof(u32)) && memory.find(barrier->blocks, sizeof(u32));
    for (u32 rank = 0; rank < barrier->ranks && is_there; rank++) {
        is_there = memory.find(barrier->theirs[rank], sizeof(u32));
    }
    return is_there;
}

void run_moves(const Function *function, std::vector<Move> moves, const Memory &memory) {
    for (Move &move : moves) {
        bool is_there = move.count > 0;
        for (u32 i = 0; i < move.source_count && is_there; i++) {
            is_there = memory.find(move.sources[i], move.count * function->from);
        }
        for (u32 i = 0; i < move.target_count && is_there; i++) {
            is_there = memory.find(move.targets[i], move.count * function->to);
        }
        if (is_there) {
            function->reduce(Parameter{move, nullptr, nullptr});
        }
    }
}

// Copies what the next kernel is to do.
void run_take(const Function *function, TakeParameter parameter, const Memory &memory) {
    if (!parameter.on_host || !memory.find(parameter.on_host, sizeof(Moves))) {
        return;
    }
    if (memory.find(parameter.moves, sizeof(Moves) + load_acquire(&parameter.on_host->count) * sizeof(Move))) {
        function->take(parameter);
    }
}

void run_reduction(const Function *function, const Parameter &parameter, const Memory &memory) {
    if (!parameter.moves) {
        run_moves(function, {parameter.only}, memory);
        return;
    }
    const Moves *header = parameter.moves;
    Moves *on_host = parameter.on_host;
    if (!memory.find(header, sizeof(Moves)) || !memory.find(on_host, sizeof(Moves))) {
        return;
    }
    const u64 began = nanoseconds();
    const u32 count = header->count;
    const Moves *whole = parameter.moves;
    if (!memory.find(whole, sizeof(Moves) + count * sizeof(Move))) {
        return;
    }
    Barrier barrier = header->barrier;
    const bool waits = barrier.ranks > 0;
    if (waits && (barrier.is_cancelled || !find(&barrier, memory))) {
        return;
    }
    const auto *list = reinterpret_cast<const Move *>(header + 1);
    const Move *middle = list + (waits ? std::min(count, header->before) : 0);
    run_moves(function, std::vector<Move>(list, middle), memory);
    if (waits && !wait(barrier, &on_host->barrier, began, false)) {
        return;
    }
    run_moves(function, std::vector<Move>(middle, list + count), memory);
    if (waits) {
        wait(barrier, &on_host->barrier, began, true);
    }
}

// Bytes of an element by the name of its type: f32, bf16, f8e4m3, bool.
size_t size_of(const std::string &type) {
    const size_t digit = type.find_first_of("0123456789");
    return digit == std::string::npos ? 1 : size_t(atoi(type.c_str() + digit)) / 8;
}

}  // namespace

extern "C" {

// Returns a kernel by its name, for the life of the process, or null if there is none of this name.
const Function *kolo_fake_kernel(const char *name) {
    Dl_info own;
    dladdr(reinterpret_cast<void *>(&kolo_fake_kernel), &own);
    void *library = dlopen(own.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    void *symbol = library ? dlsym(library, name) : nullptr;
    const std::string text = name, scale = "kolo_scale_";
    const bool scales = text.rfind(scale, 0) == 0, takes = text == "kolo_take_moves";
    if (!symbol || !(scales || takes || text.rfind("kolo_reduce_", 0) == 0)) {
        return nullptr;
    }
    auto *function = new Function{};
    if (takes) {
        function->take = reinterpret_cast<void (*)(TakeParameter)>(symbol);
        return function;
    }
    const size_t last = text.rfind('_');
    function->to = size_of(text.substr(last + 1));
    if (scales) {
        function->scale = reinterpret_cast<void (*)(ScaleParameter)>(symbol);
        function->from = size_of(text.substr(scale.size(), last - scale.size()));
    } else {
        function->reduce = reinterpret_cast<void (*)(Parameter)>(symbol);
        function->from = function->to;
    }
    return function;
}

// Returns how many bytes the parameter of a kernel has.
size_t kolo_fake_parameter(const Function *function) {
    return function->scale ? sizeof(ScaleParameter) : function->take ? sizeof(TakeParameter) : sizeof(Parameter);
}

// Runs a kernel with the parameter of its launch.
void kolo_fake_run(const Function *function, const void *parameter, char *(*resolve)(void *, u64, size_t), void *driver) {
    const Memory memory{resolve, driver};
    kolo_host_place(0, 1, 0, 1);
    if (function->scale) {
        run_scaling(function, *static_cast<const ScaleParameter *>(parameter), memory);
    } else if (function->take) {
        run_take(function, *static_cast<const TakeParameter *>(parameter), memory);
    } else {
        run_reduction(function, *static_cast<const Parameter *>(parameter), memory);
    }
}

}  // extern "C"
