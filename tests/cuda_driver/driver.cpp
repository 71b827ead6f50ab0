// A library with the name of NVIDIA's driver, for machines without a GPU: programs that use CUDA's
// driver run with it unchanged, and with them the code of kolo that calls the driver. Its GPUs are in
// host memory. Processes share them as the driver's do. `build.sh` compiles it to libcuda.so.1.
//
// It is as unfriendly as the driver where a program can notice:
//
// - Device addresses are invalid on the host. An access to memory that is not there is an error that
//   stays.
// - A call that frees or unpins memory, closes another process's memory, makes or ends streams and
//   events, or first launches a kernel takes a lock alone and waits for all streams. All other calls
//   queue behind it.
// - Kernels of two processes never run at once on a GPU.
// - A process opens an allocation of another process once. Memory of pools cannot be opened.
// - A call that CUDA calls unsafe ends a capture, unless its thread has the relaxed mode.
//
// KOLO_FAKE_GPUS is the number of GPUs (1 by default). CUDA_VISIBLE_DEVICES chooses some of them. With
// KOLO_FAKE_LIMIT they say that they end kernels which run for some seconds.
//
// The kernels are those of `cuda-kernels`, compiled as C++.

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <dlfcn.h>

#include "../../cuda-kernels/host.h"

#include "../../cuda-kernels/elements.cu"

#include "../../cuda-kernels/barrier.cu"

#include "../../cuda-kernels/reduce.cu"

#include "../../cuda-kernels/scale.cu"

#include "../../cuda-kernels/entries.cu"

namespace {

using Result = int;
using Address = unsigned long long;

constexpr Result SUCCESS = 0,
                 INVALID_VALUE = 1,
                 OUT_OF_MEMORY = 2,
                 INVALID_DEVICE = 101,
                 INVALID_IMAGE = 200,
                 INVALID_CONTEXT = 201,
                 ALREADY_MAPPED = 208,
                 INVALID_HANDLE = 400,
                 NOT_FOUND = 500,
                 NOT_READY = 600,
                 ILLEGAL_ADDRESS = 700,
                 PEER_ACCESS_ALREADY_ENABLED = 704,
                 ALREADY_REGISTERED = 712,
                 NOT_REGISTERED = 713,
                 CAPTURE_UNSUPPORTED = 900,
                 CAPTURE_INVALIDATED = 901,
                 CAPTURE_MERGE = 902,
                 CAPTURE_UNMATCHED = 903,
                 CAPTURE_UNJOINED = 904,
                 CAPTURE_ISOLATION = 905,
                 CAPTURE_IMPLICIT = 906,
                 CAPTURED_EVENT = 907;

struct Named {
    Result result;
    const char *name;
    const char *text;
};

const Named NAMES[] = {
    {SUCCESS, "CUDA_SUCCESS", "no error"},
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {ALREADY_MAPPED, "CUDA_ERROR_ALREADY_MAPPED", "resource already mapped"},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {PEER_ACCESS_ALREADY_ENABLED, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", "peer access is already enabled"},
    {ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "part or all of the requested memory range is already mapped"},
    {NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "pointer does not correspond to a registered memory region"},
    {CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
    {CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "operation failed due to a previous error during capture"},
    {CAPTURE_MERGE, "CUDA_ERROR_STREAM_CAPTURE_MERGE", "operation would result in a merge of separate capture sequences"},
    {CAPTURE_UNMATCHED, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", "capture was not ended in the same stream as it began"},
    {CAPTURE_UNJOINED, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED", "capturing stream has unjoined work"},
    {CAPTURE_ISOLATION, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION", "dependency created on uncaptured work in another stream"},
    {CAPTURE_IMPLICIT, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", "operation would make the legacy stream depend on a capturing blocking stream"},
    {CAPTURED_EVENT, "CUDA_ERROR_CAPTURED_EVENT", "operation not permitted on an event last recorded in a capturing stream"},
};

// Set in the addresses of device memory, and in those under which a device reaches pinned memory. No
// address of the host has them.
constexpr Address DEVICE = 1ull << 56;
constexpr Address PINNED = 1ull << 57;

// ---- The lock of the driver ----

class DriverLock {
  public:
    void share() {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] { return !is_alone_ && wanting_alone_ == 0; });
        ++sharing_;
    }
    void end_share() {
        std::lock_guard<std::mutex> lock(mutex_);
        --sharing_;
        changed_.notify_all();
    }
    void alone() {
        std::unique_lock<std::mutex> lock(mutex_);
        ++wanting_alone_;
        changed_.wait(lock, [&] { return !is_alone_ && sharing_ == 0; });
        --wanting_alone_;
        is_alone_ = true;
    }
    void end_alone() {
        std::lock_guard<std::mutex> lock(mutex_);
        is_alone_ = false;
        changed_.notify_all();
    }

  private:
    std::mutex mutex_;
    std::condition_variable changed_;
    int sharing_ = 0, wanting_alone_ = 0;
    bool is_alone_ = false;
};

// ---- Memory ----

struct Context {
    int device;
    std::set<Context *> peers;
};

struct Allocation {
    char *host;
    size_t size;
    uint64_t id;
    Context *context;
    // That of the memory's file, if other processes can open it.
    int file;
    bool is_import;
};

struct Handle {
    int pid;
    int file;
    uint64_t id;
    uint64_t size;
};
static_assert(sizeof(Handle) <= 64, "a handle of IPC has 64 bytes");

// ---- Streams, events and graphs ----

using Work = std::function<void()>;
// How much work of each stream comes before.
using Clock = std::map<struct Stream *, size_t>;

struct UserObject {
    void *pointer;
    void (*destroy)(void *);
    int references;
};

void release(UserObject *object, int count) {
    object->references -= count;
    if (object->references == 0) {
        object->destroy(object->pointer);
        delete object;
    }
}

struct Body {
    std::vector<Work> works;
    std::vector<UserObject *> objects;
    std::mutex runs;
    ~Body() {
        for (UserObject *object : objects) {
            release(object, 1);
        }
    }
};

struct Graph {
    std::shared_ptr<Body> body;
};

struct Capture {
    uint64_t number;
    struct Stream *origin;
    int mode;
    std::thread::id thread;
    bool is_invalid = false;
    std::map<Stream *, Clock> clocks;
    Graph *graph;
};

struct Stream {
    Context *context;
    std::deque<Work> works;
    std::condition_variable changed;
    bool is_ended = false;
    std::shared_ptr<Capture> capture;
};

struct Event {
    std::shared_ptr<std::atomic<bool>> done = std::make_shared<std::atomic<bool>>(true);
    std::shared_ptr<Capture> capture;
    Clock before;
};

// A kernel: a reduction, or a scaling between two types.
struct Function {
    void (*reduce)(Parameter);
    void (*scale)(ScaleParameter);
    void (*take)(TakeParameter);
    // Bytes of an element of the sources and of the targets.
    size_t from, to;
    bool is_loaded = false;
};

struct Process {
    DriverLock lock;
    std::mutex mutex;
    std::condition_variable is_idle;
    // Work that was enqueued and is not done.
    size_t pending = 0;
    std::atomic<Result> failure{SUCCESS};
    // The GPUs that this process sees.
    std::vector<int> gpus;
    std::map<int, Context *> contexts;
    std::map<int, Stream *> default_streams;
    std::map<Address, Allocation> memory;
    // Lengths of pinned memory by its address.
    std::map<uintptr_t, size_t> pinned;
    std::set<std::pair<int, uint64_t>> imports;
    std::set<std::shared_ptr<Capture>> captures;
    std::map<std::string, Function *> functions;
    uint64_t next = 1;
};

thread_local std::vector<Context *> current;
thread_local int capture_mode = 0;

// Never destroyed: threads of streams outlive `main`.
Process &process() {
    static Process *only = [] {
        auto *made = new Process;
        const char *count = getenv("KOLO_FAKE_GPUS");
        const int gpus = count ? atoi(count) : 1;
        if (const char *visible = getenv("CUDA_VISIBLE_DEVICES")) {
            for (const char *at = visible; *at;) {
                char *end;
                const long gpu = strtol(at, &end, 10);
                if (end == at || gpu < 0 || gpu >= gpus) {
                    break;
                }
                made->gpus.push_back(int(gpu));
                at = *end == ',' ? end + 1 : end;
            }
        } else {
            for (int gpu = 0; gpu < gpus; gpu++) {
                made->gpus.push_back(gpu);
            }
        }
        return made;
    }();
    return *only;
}

Result shared(const std::function<Result()> &call) {
    Process &p = process();
    p.lock.share();
    const Result failed = p.failure;
    const Result result = failed ? failed : call();
    p.lock.end_share();
    return result;
}

Result alone(const std::function<Result()> &call) {
    Process &p = process();
    p.lock.alone();
    {
        std::unique_lock<std::mutex> lock(p.mutex);
        p.is_idle.wait(lock, [&] { return p.pending == 0; });
    }
    const Result failed = p.failure;
    const Result result = failed ? failed : call();
    p.lock.end_alone();
    return result;
}

// Refuses a call that is unsafe while a graph is captured, and ends the capture.
Result refuse_in_capture() {
    Process &p = process();
    if (capture_mode == 2) {
        return SUCCESS;
    }
    std::lock_guard<std::mutex> lock(p.mutex);
    for (const auto &capture : p.captures) {
        if ((capture->mode == 0 && capture_mode == 0) || (capture->mode != 2 && capture->thread == std::this_thread::get_id())) {
            capture->is_invalid = true;
            return CAPTURE_UNSUPPORTED;
        }
    }
    return SUCCESS;
}

// The host's address of memory that a stream uses. Called with the lock.
char *resolve_locked(Process &p, Address address, size_t len) {
    if (address & PINNED) {
        const uintptr_t at = address & ~PINNED;
        auto found = p.pinned.upper_bound(at);
        if (found != p.pinned.begin() && at + len <= std::prev(found)->first + std::prev(found)->second) {
            return reinterpret_cast<char *>(at);
        }
        return nullptr;
    }
    auto found = p.memory.upper_bound(address);
    if (found == p.memory.begin()) {
        return nullptr;
    }
    --found;
    const size_t offset = address - found->first;
    return offset + len <= found->second.size ? found->second.host + offset : nullptr;
}

char *resolve(Address address, size_t len) {
    Process &p = process();
    std::lock_guard<std::mutex> lock(p.mutex);
    char *host = resolve_locked(p, address, len);
    if (!host) {
        fprintf(stderr, "fake CUDA driver: %zu bytes at %#llx are not device memory\n", len, address);
        Result none = SUCCESS;
        p.failure.compare_exchange_strong(none, ILLEGAL_ADDRESS);
    }
    return host;
}

void run_stream(Stream *stream) {
    Process &p = process();
    std::unique_lock<std::mutex> lock(p.mutex);
    while (true) {
        stream->changed.wait(lock, [&] { return stream->is_ended || !stream->works.empty(); });
        if (stream->works.empty()) {
            delete stream;
            return;
        }
        Work work = std::move(stream->works.front());
        stream->works.pop_front();
        lock.unlock();
        if (p.failure == SUCCESS) {
            work();
        }
        work = nullptr;
        lock.lock();
        if (--p.pending == 0) {
            p.is_idle.notify_all();
        }
    }
}

Stream *new_stream(Context *context) {
    auto *stream = new Stream;
    stream->context = context;
    std::thread(run_stream, stream).detach();
    return stream;
}

Context *context_of(int device) {
    Process &p = process();
    std::lock_guard<std::mutex> lock(p.mutex);
    Context *&context = p.contexts[device];
    if (!context) {
        context = new Context{device, {}};
        p.default_streams[device] = new_stream(context);
    }
    return context;
}

Stream *find(void *stream) {
    if (reinterpret_cast<uintptr_t>(stream) > 2) {
        return static_cast<Stream *>(stream);
    }
    return current.empty() ? nullptr : process().default_streams[current.back()->device];
}

// Gives a stream work, or the graph that captures the stream's work.
Result enqueue(void *handle, Work work) {
    Process &p = process();
    Stream *stream = find(handle);
    if (!stream) {
        return INVALID_CONTEXT;
    }
    std::lock_guard<std::mutex> lock(p.mutex);
    if (stream->capture) {
        if (stream->capture->is_invalid) {
            return CAPTURE_INVALIDATED;
        }
        stream->capture->graph->body->works.push_back(std::move(work));
        ++stream->capture->clocks[stream][stream];
        return SUCCESS;
    }
    ++p.pending;
    stream->works.push_back(std::move(work));
    stream->changed.notify_one();
    return SUCCESS;
}

Result synchronise(void *handle) {
    Stream *stream = find(handle);
    if (!stream) {
        return INVALID_CONTEXT;
    }
    auto done = std::make_shared<std::atomic<bool>>(false);
    {
        std::lock_guard<std::mutex> lock(process().mutex);
        if (stream->capture) {
            stream->capture->is_invalid = true;
            return CAPTURE_UNSUPPORTED;
        }
    }
    const Result result = enqueue(handle, [done] { *done = true; });
    while (result == SUCCESS && !*done && process().failure == SUCCESS) {
        std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    return result ? result : Result(process().failure);
}

// The lock of a GPU, for which all processes wait.
int lock_of(int device) {
    static std::map<int, int> locks;
    static std::mutex of_locks;
    std::lock_guard<std::mutex> guard(of_locks);
    auto [found, is_new] = locks.try_emplace(device, -1);
    if (is_new) {
        const std::string file = "kolo-fake-gpu-" + std::to_string(getuid()) + "-" + std::to_string(device);
        const std::string name = std::filesystem::temp_directory_path() / file;
        found->second = open(name.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600);
        if (found->second < 0) {
            perror("fake CUDA driver: the lock of a GPU");
            abort();
        }
    }
    return found->second;
}

char *resolve(const void *address, size_t len) { return resolve(Address(reinterpret_cast<uintptr_t>(address)), len); }

void run_scaling(const Function *function, ScaleParameter parameter) {
    if (parameter.count == 0) {
        return;
    }
    parameter.source = resolve(parameter.source, parameter.count * function->from);
    parameter.target = resolve(parameter.target, parameter.count * function->to);
    if (parameter.source && parameter.target) {
        kolo_host_place(0, 1, 0, 1);
        function->scale(parameter);
    }
}

// Replaces the addresses of a barrier by the host's. Returns false if one is wrong.
bool resolve(Barrier *barrier) {
    const auto find = [](u32 *&address, size_t words) {
        return (address = reinterpret_cast<u32 *>(resolve(address, words * sizeof(u32))));
    };
    bool is_there = find(barrier->own, MOST * FLAG_WORDS) && find(barrier->blocks, 1);
    for (u32 rank = 0; rank < barrier->ranks && is_there; rank++) {
        is_there = find(barrier->theirs[rank], 1);
    }
    return is_there;
}

void run_moves(const Function *function, std::vector<Move> moves) {
    for (Move &move : moves) {
        bool is_there = move.count > 0;
        for (u32 i = 0; i < move.source_count && is_there; i++) {
            is_there = (move.sources[i] = resolve(move.sources[i], move.count * function->from));
        }
        for (u32 i = 0; i < move.target_count && is_there; i++) {
            is_there = (move.targets[i] = resolve(move.targets[i], move.count * function->to));
        }
        if (is_there) {
            kolo_host_place(0, 1, 0, 1);
            function->reduce(Parameter{move, nullptr, nullptr});
        }
    }
}

// Copies what the next kernel is to do.
void run_take(const Function *function, TakeParameter parameter) {
    if (!parameter.on_host) {
        return;
    }
    const auto *on_host = reinterpret_cast<const Moves *>(resolve(parameter.on_host, sizeof(Moves)));
    if (!on_host) {
        return;
    }
    const size_t bytes = sizeof(Moves) + load_acquire(&on_host->count) * sizeof(Move);
    parameter.on_host = on_host;
    parameter.moves = reinterpret_cast<Moves *>(resolve(parameter.moves, bytes));
    if (parameter.moves) {
        kolo_host_place(0, 1, 0, 1);
        function->take(parameter);
    }
}

void run_reduction(const Function *function, const Parameter &parameter) {
    if (!parameter.moves) {
        run_moves(function, {parameter.only});
        return;
    }
    const auto *header = reinterpret_cast<const Moves *>(resolve(parameter.moves, sizeof(Moves)));
    auto *on_host = reinterpret_cast<Moves *>(resolve(parameter.on_host, sizeof(Moves)));
    if (!header || !on_host) {
        return;
    }
    const u64 began = nanoseconds();
    const u32 count = header->count;
    if (!resolve(parameter.moves, sizeof(Moves) + count * sizeof(Move))) {
        return;
    }
    Barrier barrier = header->barrier;
    const bool waits = barrier.ranks > 0;
    if (waits && (barrier.is_cancelled || !resolve(&barrier))) {
        return;
    }
    const auto *list = reinterpret_cast<const Move *>(header + 1);
    const Move *middle = list + (waits ? std::min(count, header->before) : 0);
    run_moves(function, std::vector<Move>(list, middle));
    kolo_host_place(0, 1, 0, 1);
    if (waits && !wait(barrier, &on_host->barrier, began, false)) {
        return;
    }
    run_moves(function, std::vector<Move>(middle, list + count));
    if (waits) {
        kolo_host_place(0, 1, 0, 1);
        wait(barrier, &on_host->barrier, began, true);
    }
}

Result allocate(Address *address, size_t size, bool is_shared) {
    if (current.empty()) {
        return INVALID_CONTEXT;
    }
    if (size == 0) {
        return INVALID_VALUE;
    }
    Process &p = process();
    std::lock_guard<std::mutex> lock(p.mutex);
    const uint64_t id = p.next++;
    const int file = memfd_create(("kolo-" + std::to_string(id)).c_str(), MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, off_t(size)) != 0) {
        return OUT_OF_MEMORY;
    }
    void *host = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (host == MAP_FAILED) {
        close(file);
        return OUT_OF_MEMORY;
    }
    *address = reinterpret_cast<uintptr_t>(host) | DEVICE;
    p.memory[*address] = Allocation{static_cast<char *>(host), size, id, current.back(), file, false};
    if (!is_shared) {
        close(file);
        p.memory[*address].file = -1;
    }
    return SUCCESS;
}

Result free_memory(Address address) {
    Process &p = process();
    std::lock_guard<std::mutex> lock(p.mutex);
    auto found = p.memory.find(address);
    if (found == p.memory.end() || found->second.is_import) {
        return INVALID_VALUE;
    }
    munmap(found->second.host, found->second.size);
    if (found->second.file >= 0) {
        close(found->second.file);
    }
    p.memory.erase(found);
    return SUCCESS;
}

Result copy(void *stream, std::function<char *()> to, std::function<char *()> from, size_t len) {
    return shared([&] {
        return enqueue(stream, [=] {
            char *target = to();
            char *source = from();
            if (target && source) {
                memmove(target, source, len);
            }
        });
    });
}

std::function<char *()> on_device(Address address, size_t len) {
    return [=] { return resolve(address, len); };
}

std::function<char *()> on_host(const void *pointer) {
    return [=] { return const_cast<char *>(static_cast<const char *>(pointer)); };
}

bool is_pinned(const void *memory) {
    Process &p = process();
    std::lock_guard<std::mutex> lock(p.mutex);
    return resolve_locked(p, reinterpret_cast<uintptr_t>(memory) | PINNED, 1);
}

// Bytes of an element by the name of its type: f32, bf16, f8e4m3, bool.
size_t size_of(const std::string &type) {
    const size_t digit = type.find_first_of("0123456789");
    return digit == std::string::npos ? 1 : size_t(atoi(type.c_str() + digit)) / 8;
}

const Named &named(Result result) {
    for (const Named &named : NAMES) {
        if (named.result == result) {
            return named;
        }
    }
    static const Named unknown{-1, "CUDA_ERROR_UNKNOWN", "unknown error"};
    return unknown;
}

}  // namespace

extern "C" {

Result cuGetErrorName(Result result, const char **name) {
    *name = named(result).name;
    return SUCCESS;
}

Result cuGetErrorString(Result result, const char **text) {
    *text = named(result).text;
    return SUCCESS;
}

// ---- Devices and contexts ----

Result cuInit(unsigned) { return process().gpus.empty() ? 100 : SUCCESS; }

Result cuDriverGetVersion(int *version) {
    *version = 13000;
    return SUCCESS;
}

Result cuDeviceGetCount(int *count) {
    *count = int(process().gpus.size());
    return SUCCESS;
}

Result cuDeviceGet(int *device, int ordinal) {
    if (ordinal < 0 || size_t(ordinal) >= process().gpus.size()) {
        return INVALID_DEVICE;
    }
    *device = ordinal;
    return SUCCESS;
}

Result cuDeviceGetName(char *name, int len, int device) {
    snprintf(name, size_t(len), "fake GPU %d", process().gpus[size_t(device)]);
    return SUCCESS;
}

Result cuDeviceGetUuid_v2(char uuid[16], int device) {
    memset(uuid, 0xfa, 16);
    uuid[15] = char(process().gpus[size_t(device)]);
    return SUCCESS;
}

Result cuDeviceGetUuid(char uuid[16], int device) { return cuDeviceGetUuid_v2(uuid, device); }

// NVRTC asks for tables that CUDA does not document, and ends by a null pointer where this call is
// missing.
Result cuGetExportTable(const void **, const void *) { return NOT_FOUND; }

Result cuDeviceGetAttribute(int *value, int attribute, int) {
    switch (attribute) {
    case 16:  // multiprocessors
        *value = 4;
        break;
    case 17:  // whether kernels that run for some seconds are ended
        *value = getenv("KOLO_FAKE_LIMIT") != nullptr;
        break;
    case 75:  // compute capability
        *value = 9;
        break;
    case 36:   // memory clock, kHz
    case 37:   // width of the memory bus, bits
        *value = 1000;
        break;
    case 102:  // virtual memory
    case 103:  // file descriptors for it
    case 115:  // memory pools
        *value = 1;
        break;
    default:
        *value = 0;
    }
    return SUCCESS;
}

Result cuDeviceTotalMem_v2(size_t *bytes, int) {
    *bytes = size_t(1) << 34;
    return SUCCESS;
}

Result cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    *total = *free_bytes = size_t(1) << 34;
    return SUCCESS;
}

Result cuDeviceCanAccessPeer(int *can, int, int) {
    *can = 1;
    return SUCCESS;
}

Result cuDevicePrimaryCtxRetain(Context **context, int device) {
    *context = context_of(device);
    return SUCCESS;
}

Result cuDevicePrimaryCtxRelease_v2(int) { return SUCCESS; }

Result cuCtxSetCurrent(Context *context) {
    if (!current.empty()) {
        current.pop_back();
    }
    if (context) {
        current.push_back(context);
    }
    return SUCCESS;
}

Result cuCtxGetCurrent(Context **context) {
    *context = current.empty() ? nullptr : current.back();
    return SUCCESS;
}

Result cuCtxPushCurrent_v2(Context *context) {
    current.push_back(context);
    return SUCCESS;
}

Result cuCtxPopCurrent_v2(Context **context) {
    if (current.empty()) {
        return INVALID_CONTEXT;
    }
    *context = current.back();
    current.pop_back();
    return SUCCESS;
}

Result cuCtxGetDevice(int *device) {
    if (current.empty()) {
        return INVALID_CONTEXT;
    }
    *device = current.back()->device;
    return SUCCESS;
}

Result cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return SUCCESS;
}

Result cuCtxEnablePeerAccess(Context *peer, unsigned) {
    return shared([&] {
        std::lock_guard<std::mutex> lock(process().mutex);
        return current.back()->peers.insert(peer).second ? SUCCESS : PEER_ACCESS_ALREADY_ENABLED;
    });
}

Result cuCtxSynchronize() {
    Process &p = process();
    std::unique_lock<std::mutex> lock(p.mutex);
    p.is_idle.wait(lock, [&] { return p.pending == 0; });
    return p.failure;
}

// ---- Streams and events ----

Result cuStreamCreateWithPriority(Stream **stream, unsigned, int) {
    return alone([&] {
        if (current.empty()) {
            return INVALID_CONTEXT;
        }
        *stream = new_stream(current.back());
        return SUCCESS;
    });
}

Result cuStreamCreate(Stream **stream, unsigned flags) { return cuStreamCreateWithPriority(stream, flags, 0); }

Result cuStreamDestroy_v2(Stream *stream) {
    return alone([&] {
        std::lock_guard<std::mutex> lock(process().mutex);
        stream->is_ended = true;
        stream->changed.notify_one();
        return SUCCESS;
    });
}

Result cuStreamSynchronize(void *stream) {
    if (const Result refused = refuse_in_capture()) {
        return refused;
    }
    return synchronise(stream);
}

Result cuStreamGetCtx(void *handle, Context **context) {
    Stream *stream = find(handle);
    if (!stream) {
        return INVALID_CONTEXT;
    }
    *context = stream->context;
    return SUCCESS;
}

Result cuEventCreate(Event **event, unsigned) {
    return alone([&] {
        *event = new Event;
        return SUCCESS;
    });
}

Result cuEventDestroy_v2(Event *event) {
    return alone([&] {
        delete event;
        return SUCCESS;
    });
}

Result cuEventRecord(Event *event, void *handle) {
    return shared([&] {
        Stream *stream = find(handle);
        if (!stream) {
            return INVALID_CONTEXT;
        }
        {
            std::lock_guard<std::mutex> lock(process().mutex);
            event->capture = stream->capture;
            if (stream->capture) {
                event->before = stream->capture->clocks[stream];
                return SUCCESS;
            }
            event->done = std::make_shared<std::atomic<bool>>(false);
        }
        auto done = event->done;
        return enqueue(handle, [done] { *done = true; });
    });
}

Result cuEventQuery(Event *event) {
    if (const Result refused = refuse_in_capture()) {
        return refused;
    }
    return shared([&] {
        std::lock_guard<std::mutex> lock(process().mutex);
        if (event->capture) {
            return CAPTURED_EVENT;
        }
        return *event->done ? SUCCESS : NOT_READY;
    });
}

Result cuEventSynchronize(Event *event) {
    while (true) {
        const Result result = cuEventQuery(event);
        if (result != NOT_READY) {
            return result;
        }
        std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
}

Result cuStreamWaitEvent(void *handle, Event *event, unsigned) {
    return shared([&] {
        Stream *stream = find(handle);
        if (!stream) {
            return INVALID_CONTEXT;
        }
        std::shared_ptr<std::atomic<bool>> done;
        {
            std::lock_guard<std::mutex> lock(process().mutex);
            if (event->capture) {
                if (stream->capture && stream->capture != event->capture) {
                    return CAPTURE_MERGE;
                }
                stream->capture = event->capture;
                Clock &clock = stream->capture->clocks[stream];
                for (const auto &[other, count] : event->before) {
                    clock[other] = std::max(clock[other], count);
                }
                return SUCCESS;
            }
            if (stream->capture) {
                return CAPTURE_ISOLATION;
            }
            done = event->done;
        }
        return enqueue(handle, [done] {
            while (!*done && process().failure == SUCCESS) {
                std::this_thread::sleep_for(std::chrono::microseconds(20));
            }
        });
    });
}

Result cuStreamWaitValue32_v2(void *stream, Address address, uint32_t value, unsigned flags) {
    if (flags != 0) {
        return INVALID_VALUE;
    }
    return shared([&] {
        return enqueue(stream, [=] {
            const char *host = resolve(address, 4);
            if (!host) {
                return;
            }
            const auto *word = reinterpret_cast<const std::atomic<uint32_t> *>(host);
            for (int looks = 0; int32_t(word->load() - value) < 0 && process().failure == SUCCESS; looks++) {
                if (looks < 100) {
                    std::this_thread::yield();
                } else {
                    std::this_thread::sleep_for(std::chrono::microseconds(20));
                }
            }
        });
    });
}

Result cuStreamWriteValue32_v2(void *stream, Address address, uint32_t value, unsigned) {
    return shared([&] {
        return enqueue(stream, [=] {
            if (char *host = resolve(address, 4)) {
                reinterpret_cast<std::atomic<uint32_t> *>(host)->store(value);
            }
        });
    });
}

// ---- Graphs ----

Result cuThreadExchangeStreamCaptureMode(int *mode) {
    std::swap(*mode, capture_mode);
    return SUCCESS;
}

Result cuStreamBeginCapture_v2(void *handle, int mode) {
    Process &p = process();
    std::lock_guard<std::mutex> lock(p.mutex);
    Stream *stream = find(handle);
    if (reinterpret_cast<uintptr_t>(handle) <= 2 || stream->capture) {
        return INVALID_VALUE;
    }
    auto capture = std::make_shared<Capture>();
    capture->number = p.next++;
    capture->origin = stream;
    capture->mode = mode;
    capture->thread = std::this_thread::get_id();
    capture->graph = new Graph{std::make_shared<Body>()};
    capture->clocks[stream];
    stream->capture = capture;
    p.captures.insert(capture);
    return SUCCESS;
}

Result cuStreamEndCapture(void *handle, Graph **graph) {
    Process &p = process();
    std::unique_lock<std::mutex> lock(p.mutex);
    Stream *stream = find(handle);
    *graph = nullptr;
    auto capture = stream->capture;
    if (!capture || capture->origin != stream) {
        return CAPTURE_UNMATCHED;
    }
    Result result = capture->is_invalid ? CAPTURE_INVALIDATED : SUCCESS;
    for (const auto &[other, clock] : capture->clocks) {
        other->capture = nullptr;
        const auto own = clock.find(other);
        const auto joined = capture->clocks[stream].find(other);
        const size_t known = joined == capture->clocks[stream].end() ? 0 : joined->second;
        if (own != clock.end() && own->second > known && result == SUCCESS) {
            result = CAPTURE_UNJOINED;
        }
    }
    p.captures.erase(capture);
    lock.unlock();
    if (result == SUCCESS) {
        *graph = capture->graph;
    } else {
        delete capture->graph;
    }
    return result;
}

Result cuStreamIsCapturing(void *handle, int *status) {
    int capturing = 0;
    return shared([&] {
        std::lock_guard<std::mutex> lock(process().mutex);
        Stream *stream = find(handle);
        if (!stream) {
            return INVALID_CONTEXT;
        }
        if (reinterpret_cast<uintptr_t>(handle) <= 2 && !process().captures.empty()) {
            return CAPTURE_IMPLICIT;
        }
        if (stream->capture) {
            capturing = stream->capture->is_invalid ? 2 : 1;
        }
        *status = capturing;
        return SUCCESS;
    });
}

Result cuStreamGetCaptureInfo_v2(void *handle, int *status, uint64_t *number, Graph **graph, const void ***, size_t *) {
    const Result result = cuStreamIsCapturing(handle, status);
    if (result == SUCCESS && *status == 1) {
        std::lock_guard<std::mutex> lock(process().mutex);
        *number = find(handle)->capture->number;
        *graph = find(handle)->capture->graph;
    }
    return result;
}

Result cuUserObjectCreate(UserObject **object, void *pointer, void (*destroy)(void *), unsigned references, unsigned flags) {
    if (flags != 1) {
        return INVALID_VALUE;
    }
    *object = new UserObject{pointer, destroy, int(references)};
    return SUCCESS;
}

Result cuUserObjectRelease(UserObject *object, unsigned count) {
    release(object, int(count));
    return SUCCESS;
}

Result cuGraphRetainUserObject(Graph *graph, UserObject *object, unsigned count, unsigned flags) {
    if (count != 1) {
        return INVALID_VALUE;
    }
    object->references += flags == 1 ? 0 : 1;
    graph->body->objects.push_back(object);
    return SUCCESS;
}

Result cuGraphInstantiateWithFlags(Graph **replayed, Graph *graph, unsigned long long) {
    *replayed = new Graph{graph->body};
    return SUCCESS;
}

Result cuGraphLaunch(Graph *replayed, void *stream) {
    return shared([&] {
        auto body = replayed->body;
        return enqueue(stream, [body] {
            std::lock_guard<std::mutex> one(body->runs);
            for (const Work &work : body->works) {
                work();
            }
        });
    });
}

Result cuGraphExecDestroy(Graph *replayed) {
    delete replayed;
    return SUCCESS;
}

Result cuGraphDestroy(Graph *graph) {
    delete graph;
    return SUCCESS;
}

// ---- Memory ----

Result cuMemAlloc_v2(Address *address, size_t size) {
    if (const Result refused = refuse_in_capture()) {
        return refused;
    }
    return shared([&] { return allocate(address, size, true); });
}

Result cuMemFree_v2(Address address) {
    if (const Result refused = refuse_in_capture()) {
        return refused;
    }
    return alone([&] { return free_memory(address); });
}

// Memory of a pool, which other processes cannot open.
Result cuMemAllocAsync(Address *address, size_t size, void *) {
    return shared([&] { return allocate(address, size, false); });
}

Result cuMemFreeAsync(Address address, void *stream) {
    return shared([&] { return enqueue(stream, [=] { free_memory(address); }); });
}

Result cuMemHostRegister_v2(void *memory, size_t len, unsigned) {
    if (const Result refused = refuse_in_capture()) {
        return refused;
    }
    return shared([&] {
        Process &p = process();
        std::lock_guard<std::mutex> lock(p.mutex);
        return p.pinned.emplace(reinterpret_cast<uintptr_t>(memory), len).second ? SUCCESS : ALREADY_REGISTERED;
    });
}

Result cuMemHostUnregister(void *memory) {
    if (const Result refused = refuse_in_capture()) {
        return refused;
    }
    return alone([&] {
        Process &p = process();
        std::lock_guard<std::mutex> lock(p.mutex);
        return p.pinned.erase(reinterpret_cast<uintptr_t>(memory)) ? SUCCESS : NOT_REGISTERED;
    });
}

Result cuMemHostGetDevicePointer_v2(Address *address, void *memory, unsigned) {
    return shared([&] {
        Process &p = process();
        std::lock_guard<std::mutex> lock(p.mutex);
        *address = reinterpret_cast<uintptr_t>(memory) | PINNED;
        return resolve_locked(p, *address, 1) ? SUCCESS : INVALID_VALUE;
    });
}

Result cuMemHostAlloc(void **memory, size_t len, unsigned) {
    *memory = aligned_alloc(4096, (len + 4095) / 4096 * 4096);
    return *memory ? cuMemHostRegister_v2(*memory, len, 0) : OUT_OF_MEMORY;
}

Result cuMemFreeHost(void *memory) {
    const Result result = cuMemHostUnregister(memory);
    free(memory);
    return result;
}

Result cuMemGetAddressRange_v2(Address *base, size_t *size, Address address) {
    return shared([&] {
        Process &p = process();
        std::lock_guard<std::mutex> lock(p.mutex);
        if (!(address & DEVICE) || !resolve_locked(p, address, 1)) {
            return NOT_FOUND;
        }
        const auto &[at, allocation] = *std::prev(p.memory.upper_bound(address));
        *base = at;
        *size = allocation.size;
        return SUCCESS;
    });
}

Result cuPointerGetAttribute(void *value, int attribute, Address address) {
    return shared([&] {
        Process &p = process();
        std::lock_guard<std::mutex> lock(p.mutex);
        if (!(address & DEVICE) || !resolve_locked(p, address, 1)) {
            auto found = p.pinned.upper_bound(address);
            const bool is_pinned = found != p.pinned.begin() && address < std::prev(found)->first + std::prev(found)->second;
            if (is_pinned && attribute == 2) {
                *static_cast<unsigned *>(value) = 1;
                return SUCCESS;
            }
            return INVALID_VALUE;
        }
        const Allocation &allocation = std::prev(p.memory.upper_bound(address))->second;
        switch (attribute) {
        case 1:  // context
            *static_cast<Context **>(value) = allocation.context;
            return SUCCESS;
        case 2:  // kind of memory: a device's
            *static_cast<unsigned *>(value) = 2;
            return SUCCESS;
        case 7:  // number of the allocation
            *static_cast<uint64_t *>(value) = allocation.id;
            return SUCCESS;
        case 9:  // ordinal of the device
            *static_cast<int *>(value) = allocation.context->device;
            return SUCCESS;
        default:
            return INVALID_VALUE;
        }
    });
}

Result cuIpcGetMemHandle(Handle *handle, Address address) {
    return shared([&] {
        Process &p = process();
        std::lock_guard<std::mutex> lock(p.mutex);
        auto found = p.memory.find(address);
        if (found == p.memory.end() || found->second.file < 0 || found->second.is_import) {
            return INVALID_VALUE;
        }
        memset(static_cast<void *>(handle), 0, 64);
        *handle = Handle{getpid(), found->second.file, found->second.id, found->second.size};
        return SUCCESS;
    });
}

struct IpcHandle {
    char bytes[64];
};

Result cuIpcOpenMemHandle_v2(Address *address, IpcHandle bytes, unsigned) {
    if (const Result refused = refuse_in_capture()) {
        return refused;
    }
    return shared([&] {
        Process &p = process();
        Handle handle;
        memcpy(&handle, bytes.bytes, sizeof handle);
        if (handle.pid == getpid() || current.empty()) {
            return INVALID_CONTEXT;
        }
        const std::string path = "/proc/" + std::to_string(handle.pid) + "/fd/" + std::to_string(handle.file);
        char name[64] = {};
        const std::string expected = "/memfd:kolo-" + std::to_string(handle.id) + " (deleted)";
        if (readlink(path.c_str(), name, sizeof name - 1) < 0 || expected != name) {
            return INVALID_VALUE;
        }
        std::lock_guard<std::mutex> lock(p.mutex);
        if (!p.imports.emplace(handle.pid, handle.id).second) {
            return ALREADY_MAPPED;
        }
        const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
        void *host = file < 0 ? MAP_FAILED : mmap(nullptr, handle.size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (file >= 0) {
            close(file);
        }
        if (host == MAP_FAILED) {
            p.imports.erase({handle.pid, handle.id});
            return INVALID_VALUE;
        }
        *address = reinterpret_cast<uintptr_t>(host) | DEVICE;
        // Its file has the owner's process, so that closing finds the import.
        p.memory[*address] = Allocation{static_cast<char *>(host), handle.size, handle.id, current.back(), handle.pid, true};
        return SUCCESS;
    });
}

Result cuIpcCloseMemHandle(Address address) {
    if (const Result refused = refuse_in_capture()) {
        return refused;
    }
    return alone([&] {
        Process &p = process();
        std::lock_guard<std::mutex> lock(p.mutex);
        auto found = p.memory.find(address);
        if (found == p.memory.end() || !found->second.is_import) {
            return INVALID_VALUE;
        }
        munmap(found->second.host, found->second.size);
        p.imports.erase({found->second.file, found->second.id});
        p.memory.erase(found);
        return SUCCESS;
    });
}

// ---- Virtual memory ----

struct Physical {
    int file;
    size_t size;
    int references;
};

struct Properties {
    int type;
    int handles;
    int location_type;
    int device;
};

struct Accessible {
    int location_type;
    int device;
    int flags;
};

Result cuMemGetAllocationGranularity(size_t *grain, const Properties *, int) {
    *grain = 2 << 20;
    return SUCCESS;
}

Result cuMemCreate(Physical **handle, size_t size, const Properties *properties, unsigned long long) {
    if (size == 0 || size % (2 << 20) || properties->type != 1 || properties->handles != 1 || properties->location_type != 1) {
        return INVALID_VALUE;
    }
    return shared([&] {
        const int file = memfd_create("kolo-mapped", MFD_CLOEXEC);
        if (file < 0 || ftruncate(file, off_t(size)) != 0) {
            return OUT_OF_MEMORY;
        }
        *handle = new Physical{file, size, 1};
        return SUCCESS;
    });
}

Result cuMemExportToShareableHandle(int *file, Physical *handle, int type, unsigned long long) {
    return shared([&] {
        *file = type == 1 ? dup(handle->file) : -1;
        return *file >= 0 ? SUCCESS : INVALID_VALUE;
    });
}

Result cuMemImportFromShareableHandle(Physical **handle, void *file, int type) {
    return shared([&] {
        const int own = type == 1 ? dup(int(reinterpret_cast<intptr_t>(file))) : -1;
        if (own < 0) {
            return INVALID_VALUE;
        }
        *handle = new Physical{own, size_t(lseek(own, 0, SEEK_END)), 1};
        return SUCCESS;
    });
}

Result cuMemRelease(Physical *handle) {
    return shared([&] {
        close(handle->file);
        delete handle;
        return SUCCESS;
    });
}

Result cuMemAddressReserve(Address *address, size_t size, size_t, Address, unsigned long long) {
    return shared([&] {
        void *host = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        *address = reinterpret_cast<uintptr_t>(host) | DEVICE;
        return host == MAP_FAILED ? OUT_OF_MEMORY : SUCCESS;
    });
}

Result cuMemAddressFree(Address address, size_t size) {
    return shared([&] {
        munmap(reinterpret_cast<void *>(address & ~DEVICE), size);
        return SUCCESS;
    });
}

// Without access until cuMemSetAccess.
Result cuMemMap(Address address, size_t size, size_t, Physical *handle, unsigned long long) {
    return alone([&] {
        Process &p = process();
        std::lock_guard<std::mutex> lock(p.mutex);
        void *host = reinterpret_cast<void *>(address & ~DEVICE);
        if (size != handle->size || mmap(host, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, handle->file, 0) == MAP_FAILED) {
            return INVALID_VALUE;
        }
        p.memory[address] = Allocation{static_cast<char *>(host), 0, p.next++, current.empty() ? nullptr : current.back(), -1, true};
        return SUCCESS;
    });
}

Result cuMemSetAccess(Address address, size_t size, const Accessible *, size_t count) {
    return alone([&] {
        Process &p = process();
        std::lock_guard<std::mutex> lock(p.mutex);
        auto found = p.memory.find(address);
        if (count == 0 || found == p.memory.end()) {
            return INVALID_VALUE;
        }
        found->second.size = size;
        return SUCCESS;
    });
}

Result cuMemUnmap(Address address, size_t) {
    return alone([&] {
        Process &p = process();
        std::lock_guard<std::mutex> lock(p.mutex);
        return p.memory.erase(address) ? SUCCESS : INVALID_VALUE;
    });
}

Result cuMemcpyAsync(Address to, Address from, size_t len, void *stream) {
    return copy(stream, on_device(to, len), on_device(from, len), len);
}

Result cuMemcpyDtoDAsync_v2(Address to, Address from, size_t len, void *stream) { return cuMemcpyAsync(to, from, len, stream); }

// A copy to memory that is not pinned has ended when the call returns.
Result cuMemcpyDtoHAsync_v2(void *to, Address from, size_t len, void *stream) {
    const Result result = copy(stream, on_host(to), on_device(from, len), len);
    return result || is_pinned(to) ? result : synchronise(stream);
}

// What is copied from memory that is not pinned has been read when the call returns.
Result cuMemcpyHtoDAsync_v2(Address to, const void *from, size_t len, void *stream) {
    if (is_pinned(from)) {
        return copy(stream, on_device(to, len), on_host(from), len);
    }
    const auto *bytes = static_cast<const char *>(from);
    auto read = std::make_shared<std::vector<char>>(bytes, bytes + len);
    return copy(stream, on_device(to, len), [read] { return read->data(); }, len);
}

Result cuMemcpyDtoH_v2(void *to, Address from, size_t len) {
    const Result result = cuMemcpyDtoHAsync_v2(to, from, len, nullptr);
    return result ? result : synchronise(nullptr);
}

Result cuMemcpyHtoD_v2(Address to, const void *from, size_t len) {
    const Result result = cuMemcpyHtoDAsync_v2(to, from, len, nullptr);
    return result ? result : synchronise(nullptr);
}

Result cuMemcpyDtoD_v2(Address to, Address from, size_t len) {
    const Result result = cuMemcpyAsync(to, from, len, nullptr);
    return result ? result : synchronise(nullptr);
}

Result cuMemsetD8Async(Address address, unsigned char value, size_t len, void *stream) {
    return shared([&] {
        return enqueue(stream, [=] {
            if (char *host = resolve(address, len)) {
                memset(host, value, len);
            }
        });
    });
}

Result cuMemsetD8_v2(Address address, unsigned char value, size_t len) {
    const Result result = cuMemsetD8Async(address, value, len, nullptr);
    return result ? result : synchronise(nullptr);
}

// ---- Kernels ----

Result cuModuleLoadData(void **module, const void *image) {
    return shared([&] {
        const std::string begin(static_cast<const char *>(image), 2);
        // PTX begins with a comment, and machine code is an ELF file.
        if (begin != "//" && begin != "\x7f" "E") {
            return INVALID_IMAGE;
        }
        static int only;
        *module = &only;
        return SUCCESS;
    });
}

Result cuModuleUnload(void *) { return SUCCESS; }

Result cuModuleGetFunction(Function **function, void *, const char *name) {
    return shared([&] {
        Process &p = process();
        std::lock_guard<std::mutex> lock(p.mutex);
        Function *&known = p.functions[name];
        if (!known) {
            Dl_info own;
            dladdr(reinterpret_cast<void *>(&cuModuleLoadData), &own);
            void *library = dlopen(own.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
            void *symbol = library ? dlsym(library, name) : nullptr;
            const std::string text = name;
            const bool is_scaling = text.rfind("kolo_scale_", 0) == 0, takes = text == "kolo_take_moves";
            if (!symbol || !(is_scaling || takes || text.rfind("kolo_reduce_", 0) == 0)) {
                p.functions.erase(name);
                return NOT_FOUND;
            }
            const size_t last = text.rfind('_');
            const std::string to = text.substr(last + 1);
            const std::string from = is_scaling ? text.substr(strlen("kolo_scale_"), last - strlen("kolo_scale_")) : to;
            known = new Function{};
            if (takes) {
                known->take = reinterpret_cast<void (*)(TakeParameter)>(symbol);
                *function = known;
                return SUCCESS;
            }
            known->from = size_of(from);
            known->to = size_of(to);
            if (is_scaling) {
                known->scale = reinterpret_cast<void (*)(ScaleParameter)>(symbol);
            } else {
                known->reduce = reinterpret_cast<void (*)(Parameter)>(symbol);
            }
        }
        *function = known;
        return SUCCESS;
    });
}

Result cuLaunchKernel(
    Function *function, unsigned blocks, unsigned, unsigned, unsigned threads, unsigned, unsigned, unsigned, void *stream,
    void **parameters, void **
) {
    if (blocks == 0 || threads == 0 || threads > 1024) {
        return INVALID_VALUE;
    }
    Work work;
    if (function->scale) {
        ScaleParameter parameter;
        memcpy(static_cast<void *>(&parameter), parameters[0], sizeof parameter);
        work = [=] { run_scaling(function, parameter); };
    } else if (function->take) {
        TakeParameter parameter;
        memcpy(static_cast<void *>(&parameter), parameters[0], sizeof parameter);
        work = [=] { run_take(function, parameter); };
    } else {
        Parameter parameter;
        memcpy(static_cast<void *>(&parameter), parameters[0], sizeof parameter);
        work = [=] { run_reduction(function, parameter); };
    }
    bool is_loaded;
    {
        std::lock_guard<std::mutex> lock(process().mutex);
        is_loaded = std::exchange(function->is_loaded, true);
    }
    if (!is_loaded) {
        alone([] { return SUCCESS; });
    }
    return shared([&] {
        Stream *own = find(stream);
        if (!own) {
            return INVALID_CONTEXT;
        }
        const int lock = lock_of(process().gpus[size_t(own->context->device)]);
        return enqueue(stream, [=] {
            flock(lock, LOCK_EX);
            work();
            flock(lock, LOCK_UN);
        });
    });
}

}  // extern "C"
