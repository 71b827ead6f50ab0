/* Every call with every type and reduction, compared with the host: client RANKS host|device.
 * On host memory one thread has all ranks, in groups, as nccl-tests has them. On devices each rank is
 * a process. It is compiled with NVIDIA's nccl.h. */
#include <dlfcn.h>
#include <nccl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

/* Elements of a rank's block: few by default. */
#ifndef COUNT
#define COUNT 37
#endif
#define MOST 8
#define CHECK(call) check((call), #call, __LINE__)
static void check(ncclResult_t result, const char* call, int line) {
    if (result == ncclSuccess) return;
    fprintf(stderr, "line %d: %s: %d, %s: %s\n", line, call, result, ncclGetErrorString(result), ncclGetLastError(NULL));
    exit(1);
}
static void fail(const char* what, int a, int b, int c) {
    fprintf(stderr, "wrong: %s (%d, %d, %d)\n", what, a, b, c);
    exit(1);
}

/* The driver, which is loaded as kolo loads it. */
/* The ranks of this process: all, or one of those that have device memory. */
static int first, last;
static int on_device;
static void* context[MOST];
static cudaStream_t stream[MOST];
static int (*set_current)(void*), (*mem_alloc)(unsigned long long*, size_t), (*mem_free)(unsigned long long);
static int (*to_device)(unsigned long long, const void*, size_t), (*to_host)(void*, unsigned long long, size_t);
static int (*synchronize)(cudaStream_t);
static void need(int result, const char* what) { if (result != 0) fail(what, result, 0, 0); }
static void open_driver(int ranks) {
    void* driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (!driver) fail("no libcuda.so.1", 0, 0, 0);
    int (*init)(unsigned) = dlsym(driver, "cuInit");
    int (*count)(int*) = dlsym(driver, "cuDeviceGetCount");
    int (*retain)(void**, int) = dlsym(driver, "cuDevicePrimaryCtxRetain");
    int (*create)(cudaStream_t*, unsigned) = dlsym(driver, "cuStreamCreate");
    set_current = dlsym(driver, "cuCtxSetCurrent");
    mem_alloc = dlsym(driver, "cuMemAlloc_v2");
    mem_free = dlsym(driver, "cuMemFree_v2");
    to_device = dlsym(driver, "cuMemcpyHtoD_v2");
    to_host = dlsym(driver, "cuMemcpyDtoH_v2");
    synchronize = dlsym(driver, "cuStreamSynchronize");
    need(init(0), "cuInit");
    int devices = 0;
    need(count(&devices), "cuDeviceGetCount");
    for (int r = first; r < last; r++) {
        need(retain(&context[r], r % devices), "cuDevicePrimaryCtxRetain");
        need(set_current(context[r]), "cuCtxSetCurrent");
        need(create(&stream[r], 1), "cuStreamCreate");
    }
}

static void use(int r) { if (on_device) need(set_current(context[r]), "cuCtxSetCurrent"); }
static void* new_memory(int r, size_t bytes) {
    unsigned long long at = 0;
    use(r);
    if (!on_device) return calloc(1, bytes);
    need(mem_alloc(&at, bytes), "cuMemAlloc");
    return (void*)at;
}
static void put(int r, void* to, const void* from, size_t bytes) {
    use(r);
    if (on_device) need(to_device((unsigned long long)to, from, bytes), "cuMemcpyHtoD"); else memcpy(to, from, bytes);
}
static void get(int r, void* to, const void* from, size_t bytes) {
    use(r);
    if (on_device) {
        need(synchronize(stream[r]), "cuStreamSynchronize");
        need(to_host(to, (unsigned long long)from, bytes), "cuMemcpyDtoH");
    } else memcpy(to, from, bytes);
}

static const size_t size_of[12] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
/* Values are small enough to be exact in every type. */
static double decode(const void* at, int type, size_t i) {
    switch (type) {
    case 0: return ((const int8_t*)at)[i];
    case 1: return ((const uint8_t*)at)[i];
    case 2: return ((const int32_t*)at)[i];
    case 3: return ((const uint32_t*)at)[i];
    case 4: return (double)((const int64_t*)at)[i];
    case 5: return (double)((const uint64_t*)at)[i];
    case 7: return ((const float*)at)[i];
    case 8: return ((const double*)at)[i];
    }
    /* Small floats: sign, exponent, mantissa. */
    int mantissa = type == 6 ? 10 : type == 9 ? 7 : type == 10 ? 3 : 2, bits = size_of[type] * 8;
    int bias = type == 6 ? 15 : type == 9 ? 127 : type == 10 ? 7 : 15;
    unsigned raw = bits == 16 ? ((const uint16_t*)at)[i] : ((const uint8_t*)at)[i];
    int exponent = (raw >> mantissa) & ((1 << (bits - 1 - mantissa)) - 1);
    double value = (raw & ((1u << mantissa) - 1)) + (exponent ? (1 << mantissa) : 0);
    for (int e = (exponent ? exponent : 1) - bias - mantissa; e > 0; e--) value *= 2;
    for (int e = (exponent ? exponent : 1) - bias - mantissa; e < 0; e++) value /= 2;
    return raw >> (bits - 1) ? -value : value;
}
static void encode(void* at, int type, size_t i, double value) {
    switch (type) {
    case 0: ((int8_t*)at)[i] = value; return;
    case 1: ((uint8_t*)at)[i] = value; return;
    case 2: ((int32_t*)at)[i] = value; return;
    case 3: ((uint32_t*)at)[i] = value; return;
    case 4: ((int64_t*)at)[i] = value; return;
    case 5: ((uint64_t*)at)[i] = value; return;
    case 7: ((float*)at)[i] = value; return;
    case 8: ((double*)at)[i] = value; return;
    }
    /* The bits of 1 and 2, found once. */
    static unsigned known[12][3];
    unsigned* raw = &known[type][(int)value];
    for (;; ++*raw) {
        if (size_of[type] == 2) ((uint16_t*)at)[i] = *raw; else ((uint8_t*)at)[i] = *raw;
        if (decode(at, type, i) == value) return;
    }
}
static double value(int rank, size_t i) { return 1 + (rank + i) % 2; }
static double reduce(int op, int ranks, size_t i) {
    double result = value(0, i), sum = 0;
    for (int r = 0; r < ranks; r++) sum += value(r, i);
    for (int r = 1; r < ranks; r++) {
        double one = value(r, i);
        result = op == 1 ? result * one : op == 2 ? (one > result ? one : result) : one < result ? one : result;
    }
    return op == 0 ? sum : op == 4 ? sum / ranks : result;
}

enum { ALL_REDUCE, REDUCE, REDUCE_SCATTER, BROADCAST, BCAST, ALL_GATHER, ALL_TO_ALL, GATHER, SCATTER, EXCHANGE, CALLS };

static void run(ncclComm_t* comms, int ranks, int call, int type, int op, int with_config, double factor, ncclRedOp_t* scaled) {
    size_t size = size_of[type], whole = (size_t)ranks * COUNT;
    void *host = malloc(whole * size), *send[MOST], *recv[MOST];
    ncclCollConfig_t config = NCCL_COLLCONFIG_INITIALIZER, *c = &config;
    int root = ranks - 1, takes_all = call == REDUCE_SCATTER || call == ALL_TO_ALL || call == SCATTER || call == EXCHANGE;
    for (int r = first; r < last; r++) {
        for (size_t i = 0; i < whole; i++) encode(host, type, i, value(r, i));
        send[r] = new_memory(r, whole * size);
        recv[r] = new_memory(r, whole * size);
        put(r, send[r], host, whole * size);
    }
    CHECK(ncclGroupStart());
    for (int r = first; r < last; r++) {
        ncclComm_t m = comms[r];
        cudaStream_t s = stream[r];
        ncclRedOp_t o = scaled ? scaled[r] : (ncclRedOp_t)op;
        void *in = send[r], *out = recv[r];
        switch (call) {
        case ALL_REDUCE: CHECK(with_config ? ncclAllReduceConfig(in, out, COUNT, type, o, m, s, c) : ncclAllReduce(in, out, COUNT, type, o, m, s)); break;
        case REDUCE: CHECK(with_config ? ncclReduceConfig(in, out, COUNT, type, o, root, m, s, c) : ncclReduce(in, out, COUNT, type, o, root, m, s)); break;
        case REDUCE_SCATTER: CHECK(with_config ? ncclReduceScatterConfig(in, out, COUNT, type, o, m, s, c) : ncclReduceScatter(in, out, COUNT, type, o, m, s)); break;
        case BROADCAST: CHECK(with_config ? ncclBroadcastConfig(in, out, COUNT, type, root, m, s, c) : ncclBroadcast(in, out, COUNT, type, root, m, s)); break;
        case BCAST: CHECK(ncclBcast(in, COUNT, type, root, m, s)); break;
        case ALL_GATHER: CHECK(with_config ? ncclAllGatherConfig(in, out, COUNT, type, m, s, c) : ncclAllGather(in, out, COUNT, type, m, s)); break;
        case ALL_TO_ALL: CHECK(with_config ? ncclAlltoAllConfig(in, out, COUNT, type, m, s, c) : ncclAlltoAll(in, out, COUNT, type, m, s)); break;
        case GATHER: CHECK(with_config ? ncclGatherConfig(in, out, COUNT, type, root, m, s, c) : ncclGather(in, out, COUNT, type, root, m, s)); break;
        case SCATTER: CHECK(with_config ? ncclScatterConfig(in, out, COUNT, type, root, m, s, c) : ncclScatter(in, out, COUNT, type, root, m, s)); break;
        case EXCHANGE:
            for (int p = 0; p < ranks; p++) {
                CHECK(ncclSend((char*)in + p * COUNT * size, COUNT, type, p, m, s));
                CHECK(ncclRecv((char*)out + p * COUNT * size, COUNT, type, p, m, s));
            }
        }
    }
    CHECK(ncclGroupEnd());
    for (int r = first; r < last; r++) {
        int has = (call != REDUCE && call != GATHER) || r == root;
        size_t blocks = call == ALL_GATHER || call == ALL_TO_ALL || call == GATHER || call == EXCHANGE ? ranks : 1;
        get(r, host, call == BCAST ? send[r] : recv[r], whole * size);
        for (size_t i = 0; has && i < blocks * COUNT; i++) {
            size_t block = i / COUNT, at = i % COUNT;
            double expected = call == ALL_REDUCE || call == REDUCE ? reduce(op, ranks, i)
                : call == REDUCE_SCATTER ? reduce(op, ranks, r * COUNT + i)
                : call == BROADCAST || call == BCAST ? value(root, i)
                : call == SCATTER ? value(root, r * COUNT + i)
                : takes_all ? value(block, r * COUNT + at)
                : value(block, at);
            if (call <= REDUCE_SCATTER && op == 4 && type < 6) expected = (double)(long long)expected;
            if (call <= REDUCE_SCATTER) expected *= factor;
            if (decode(host, type, i) != expected && !(op == 4 && type >= 6)) {
                fprintf(stderr, "call %d type %d op %d rank %d element %zu: %f, not %f\n", call, type, op, r, i, decode(host, type, i), expected);
                exit(1);
            }
            /* An average of three is not exact. */
            if (op == 4 && type >= 6 && (decode(host, type, i) - expected > 0.13 || expected - decode(host, type, i) > 0.13)) fail("average", call, type, (int)i);
        }
    }
    for (int r = first; r < last; r++) {
        use(r);
        if (on_device) need(mem_free((unsigned long long)send[r]), "cuMemFree"), need(mem_free((unsigned long long)recv[r]), "cuMemFree");
        else free(send[r]), free(recv[r]);
    }
    free(host);
}

/* Functions that have no data. */
static void others(ncclComm_t* comms, int ranks) {
    int number = 0;
    CHECK(ncclGetVersion(&number));
    if (number != 23203) fail("version", number, 0, 0);
    if (on_device) {
        CHECK(ncclCommCuDevice(comms[first], &number));
        if (number < 0) fail("device", number, 0, 0);
    } else if (ncclCommCuDevice(comms[first], &number) != ncclUnhandledCudaError) fail("device", 0, 0, 0);
    void *memory = NULL, *handle = NULL, *found = NULL;
    use(first);
    CHECK(ncclMemAlloc(&memory, 10000));
    CHECK(ncclCommRegister(comms[first], memory, 10000, &handle));
    CHECK(ncclCommDeregister(comms[first], handle));
    ncclWindow_t window = NULL;
    CHECK(ncclCommWindowRegister(comms[first], memory, 10000, &window, NCCL_WIN_COLL_SYMMETRIC));
    CHECK(ncclWinGetUserPtr(comms[first], window, &found));
    if (found != memory) fail("window", 0, 0, 0);
    CHECK(ncclCommWindowDeregister(comms[first], window));
    if (ncclCommDeregister(comms[first], handle) != ncclInvalidArgument) fail("deregistered twice", 0, 0, 0);
    CHECK(ncclMemFree(memory));
    ncclSimInfo_t info = NCCL_SIM_INFO_INITIALIZER;
    float data = 1;
    CHECK(ncclGroupStart());
    for (int r = first; r < last; r++) CHECK(ncclAllReduce(&data, &data, 1, ncclFloat, ncclSum, comms[r], NULL));
    CHECK(ncclGroupSimulateEnd(&info));
    if (!(info.estimatedTime > 0 || ranks == 1) || data != 1) fail("simulation", (int)info.estimatedTime, 0, 0);
    if (ncclSignal(0, 0, 0, 0, comms[first], NULL) != ncclInvalidUsage || !strstr(ncclGetLastError(NULL), "one-sided")) fail("signal", 0, 0, 0);
    if (ncclCommSuspend(comms[first], NCCL_SUSPEND_MEM) != ncclInvalidUsage) fail("suspend", 0, 0, 0);
    const char** table;
    CHECK(ncclParamGetAllParameterKeys(&table, &number));
    ncclParamHandle_t parameter;
    const char* text;
    CHECK(ncclParamBind(&parameter, table[number - 1]));
    CHECK(ncclParamGetStr(parameter, &text));
    if (ncclParamBind(&parameter, "NCCL_NO_SUCH") != ncclInvalidArgument) fail("parameter", 0, 0, 0);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.magic = 1;
    ncclComm_t part;
    if (ncclCommSplit(comms[first], 0, 0, &part, &config) != ncclInvalidArgument) fail("magic", 0, 0, 0);
}

/* Ranks of one process refuse device memory, and go on with host memory. */
static int companions(void) {
    ncclComm_t comms[2];
    float numbers[2] = {1, 2};
    void* memory;
    open_driver(2);
    CHECK(ncclCommInitAll(comms, 2, NULL));
    CHECK(ncclMemAlloc(&memory, sizeof numbers));
    if (ncclAllReduce(memory, memory, 1, ncclFloat, ncclSum, comms[0], NULL) != ncclInvalidUsage) fail("refusal", 0, 0, 0);
    CHECK(ncclGroupStart());
    if (ncclSend(memory, 1, ncclFloat, 1, comms[0], NULL) != ncclInvalidUsage) fail("refusal in a group", 0, 0, 0);
    if (ncclGroupEnd() != ncclInvalidUsage || !strstr(ncclGetLastError(comms[0]), "start a process for each rank")) fail("end of group", 0, 0, 0);
    /* The host would compute it. */
    if (ncclAllReduce(NULL, numbers, 1, ncclInt, ncclAvg, comms[0], NULL) != ncclInvalidArgument) fail("no buffer", 0, 0, 0);
    /* As on a thread that has no context: NCCL makes that of the memory current. */
    need(set_current(NULL), "cuCtxSetCurrent");
    CHECK(ncclMemFree(memory));
    /* An operator belongs to one communicator. */
    ncclRedOp_t twice;
    float factor = 2;
    CHECK(ncclRedOpCreatePreMulSum(&twice, &factor, ncclFloat, ncclScalarHostImmediate, comms[0]));
    if (ncclAllReduce(numbers, numbers, 1, ncclFloat, twice, comms[1], NULL) != ncclInvalidArgument) fail("operator", 0, 0, 0);
    CHECK(ncclRedOpDestroy(twice, comms[0]));
    CHECK(ncclGroupStart());
    /* A question that fails does not end the group. */
    if (ncclCommCount(NULL, NULL) != ncclInvalidArgument) fail("question", 0, 0, 0);
    for (int r = 0; r < 2; r++) CHECK(ncclAllReduce(&numbers[r], &numbers[r], 1, ncclFloat, ncclSum, comms[r], NULL));
    CHECK(ncclGroupEnd());
    if (numbers[0] != 3 || numbers[1] != 3) fail("sum after refusal", 0, 0, 0);
    for (int r = 0; r < 2; r++) CHECK(ncclCommDestroy(comms[r]));
    printf("client: ranks of one process refuse device memory\n");
    return 0;
}

/* The stream waits, and the call has returned: a peer's end is found out when the program asks for the
 * state, and is the last error of the process. */
static int loss(void) {
    ncclUniqueId id;
    ncclComm_t comm;
    CHECK(ncclGetUniqueId(&id));
    first = fork() == 0, last = first + 1, on_device = 1;
    open_driver(2);
    CHECK(ncclCommInitRank(&comm, 2, id, first));
    float* memory = new_memory(first, sizeof *memory);
    CHECK(ncclAllReduce(memory, memory, 1, ncclFloat, ncclSum, comm, stream[first]));
    need(synchronize(stream[first]), "cuStreamSynchronize");
    if (first == 1) _exit(0);
    CHECK(ncclAllReduce(memory, memory, 1, ncclFloat, ncclSum, comm, stream[first]));
    ncclResult_t state = ncclSuccess;
    for (int i = 0; i < 30000 && state == ncclSuccess; i++, usleep(1000)) CHECK(ncclCommGetAsyncError(comm, &state));
    if (state != ncclRemoteError || !strstr(ncclGetLastError(NULL), "rank 1")) {
        fprintf(stderr, "%s\n", ncclGetLastError(NULL));
        fail("state", state, 0, 0);
    }
    /* The newest error wins, however often the program asks for the state. */
    if (ncclCommCount(NULL, NULL) != ncclInvalidArgument) fail("question", 0, 0, 0);
    CHECK(ncclCommGetAsyncError(comm, &state));
    if (state != ncclRemoteError || strstr(ncclGetLastError(NULL), "rank 1")) fail("newest error", state, 0, 0);
    CHECK(ncclCommAbort(comm));
    while (wait(NULL) > 0) {}
    printf("client: the loss of a rank is the last error of the process\n");
    return 0;
}

int main(int argc, char** argv) {
    if (argc > 1 && !strcmp(argv[1], "companions")) return companions();
    if (argc > 1 && !strcmp(argv[1], "loss")) return loss();
    int ranks = argc > 2 ? atoi(argv[1]) : 2;
    on_device = argc > 2 && !strcmp(argv[2], "device");
    ncclComm_t comms[MOST], parts[MOST];
    ncclUniqueId id;
    CHECK(ncclGetUniqueId(&id));
    last = ranks;
    if (on_device) {
        int child = 1, failed = 0, status;
        for (int r = 0; r < ranks && child; r++) {
            child = fork();
            if (!child) first = r, last = r + 1;
        }
        if (child) {
            while (wait(&status) > 0) failed |= status;
            return failed ? 1 : 0;
        }
        open_driver(ranks);
    }
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    CHECK(ncclGroupStart());
    for (int r = first; r < last; r++) {
        use(r);
        CHECK(ncclCommInitRankConfig(&comms[r], ranks, id, r, &config));
    }
    CHECK(ncclGroupEnd());
    int done = 0;
    for (int call = 0; call < CALLS; call++)
        for (int type = 0; type < ncclNumTypes; type++)
            for (int op = 0; op < (call <= REDUCE_SCATTER ? ncclNumOps : 1); op++, done++)
                run(comms, ranks, call, type, op, call < EXCHANGE && call != BCAST && done % 2, 1, NULL);
    for (int type = 0; type < ncclNumTypes; type++)
        for (int call = ALL_REDUCE; call <= REDUCE_SCATTER; call++, done++) {
            ncclRedOp_t scaled[MOST];
            uint64_t factor;
            encode(&factor, type, 0, 2);
            for (int r = first; r < last; r++) CHECK(ncclRedOpCreatePreMulSum(&scaled[r], &factor, type, ncclScalarHostImmediate, comms[r]));
            run(comms, ranks, call, type, 0, 0, 2, scaled);
            for (int r = first; r < last; r++) CHECK(ncclRedOpDestroy(scaled[r], comms[r]));
        }
    others(comms, ranks);
    CHECK(ncclGroupStart());
    for (int r = first; r < last; r++) CHECK(ncclCommSplit(comms[r], r % 2, r, &parts[r], NULL));
    CHECK(ncclGroupEnd());
    for (int r = first; r < last; r++) CHECK(ncclCommFinalize(parts[r]));
    for (int r = first; r < last; r++) CHECK(ncclCommDestroy(parts[r]));
    for (int r = first; r < last; r++) CHECK(ncclCommDestroy(comms[r]));
    printf("client: %d calls on %d ranks with %s memory are right\n", done, ranks, on_device ? "device" : "host");
    return 0;
}
