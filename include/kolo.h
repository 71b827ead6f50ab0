/* kolo: collective communication for processes. See https://docs.rs/kolo for what the operations do.
 *
 * Generated from capi/src; do not edit.
 *
 * Errors. Every function that returns a kolo_result_t returns KOLO_OK, which is 0, or why it failed; kolo_last_error then says who
 * it was and what to do. No call hangs: all waits have a deadline. KOLO_ERR_ARGUMENT, KOLO_ERR_HANDLE, KOLO_ERR_SETTING,
 * KOLO_ERR_UNSUPPORTED and KOLO_ERR_REDUCER leave the communicator as it was; any other error of an operation ends it, on all ranks,
 * as `usable` of kolo_error_t says: its later calls return KOLO_ERR_REVOKED. What is left is kolo_comm_shrink, which makes a new one
 * of the ranks that are there, and kolo_comm_destroy.
 *
 * Handles (kolo_comm_t, kolo_work_t, kolo_reducer_t) are numbers, not addresses. One that is null, foreign or dead is an error, and nothing worse.
 *
 * Buffers belong to the caller. A blocking call uses them until it returns; one in a group until kolo_group_end returns; one that
 * was started until kolo_work_wait or kolo_work_test says that it has ended. Counts are elements, from 0. A buffer of 0 elements may
 * be NULL. Pointers must be aligned to the element. Send and receive buffers are apart, or in place as each call says. The types
 * and functions are not for signal handlers, and a communicator is not for the child of a fork.
 *
 * Threads. All functions may be called by any thread at any time. Every rank makes the same calls on a communicator in the same
 * order, so calls of several threads on one communicator must be ordered by the program; they are carried out one after the
 * other. A group belongs to its thread.
 *
 * Units. Ranks, roots, colors: int32_t. Counts: size_t, in elements; memory in bytes. Times: as the names say (_ms, _us).
 */

#ifndef KOLO_H
#define KOLO_H

#include <stddef.h>
#include <stdint.h>

// What a kolo_config_t begins with: `kolo_config_t config = KOLO_CONFIG_INITIALIZER;`
#define KOLO_CONFIG_INITIALIZER \
  { sizeof(kolo_config_t), KOLO_CONFIG_VERSION, 0, 0, 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 0, 0, 0.0, 0.0, NULL, 0, 0, NULL, NULL, NULL, NULL, NULL }

// What a kolo_reducer_config_t begins with.
#define KOLO_REDUCER_CONFIG_INITIALIZER \
  { sizeof(kolo_reducer_config_t), KOLO_REDUCER_CONFIG_VERSION, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, NULL, NULL, NULL }

// What a kolo_error_t begins with, before kolo_last_error.
#define KOLO_ERROR_INITIALIZER \
  { sizeof(kolo_error_t), 0, 0, 0, 0, 0, 0, 0, 0, { 0 }, { 0 } }

// The version of this header, which is that of the library it was generated from.
#define KOLO_VERSION_MAJOR 0

#define KOLO_VERSION_MINOR 1

#define KOLO_VERSION_PATCH 0

// The version of kolo_config_t in this header.
#define KOLO_CONFIG_VERSION 1

// The color of a rank that takes part in none of the communicators that kolo_comm_split makes.
#define KOLO_NO_COLOR -1

// The version of kolo_reducer_config_t in this header.
#define KOLO_REDUCER_CONFIG_VERSION 1

// With kolo_reducer_sync_buffers: floating-point buffers become their average over all ranks.
#define KOLO_SYNC_AVERAGE -1

// A communicator: a group of ranks, seen from one of them. A handle: it is a number and no address, and may be copied.
typedef struct kolo_comm kolo_comm;

// A gradient reducer, for data-parallel training. A handle: it is a number and no address, and may be copied.
typedef struct kolo_reducer kolo_reducer;

// Where a function of kolo_store_t puts the value that it found, with kolo_store_reply. A handle that is valid until it returns.
typedef struct kolo_reply kolo_reply;

// An operation in flight. A handle, to be given to kolo_work_destroy.
typedef struct kolo_work kolo_work;

// What a call returns: `KOLO_OK`, or why it failed.
typedef int32_t kolo_result_t;

typedef struct kolo_comm *kolo_comm_t;

// What a rank did that failed.
typedef int32_t kolo_cause_t;

// An operation, as errors name it.
typedef int32_t kolo_op_t;

// What went wrong, in full. Begin with KOLO_ERROR_INITIALIZER, or set `size`, before kolo_last_error.
typedef struct kolo_error_t {
  // In: the size of this struct as the caller knows it.
  size_t size;
  // What the call returned; `KOLO_OK` if nothing has failed.
  kolo_result_t code;
  // Whether the communicator can still be used: 1 or 0.
  int32_t usable;
  // The rank at fault, in the communicator of the call; -1 if it is none's or not known whose. Of several ranks, the lowest.
  int32_t rank;
  // What it did.
  kolo_cause_t cause;
  // The operation that failed. What goes wrong between two ranks while one receives is told of the send that it waits for.
  kolo_op_t op;
  // Its process on its host; 0 if not known.
  uint32_t pid;
  // The operation's sequence number in its communicator (for `send` and `recv`, among the messages of the two ranks).
  uint64_t seq;
  // How long the operation had been running, in microseconds; 0 if not known.
  uint64_t after_us;
  // The name of the host of the rank at fault; empty if not known.
  char host[256];
  // What happened, to whom, and what to do: a sentence in UTF-8.
  char message[2048];
} kolo_error_t;

// What ranks share that find each other with kolo_comm_init_rank. It has a secret in it, that keeps strangers out: hand it to ranks
// only. It can be copied, and serves for one communicator.
typedef struct kolo_unique_id_t {
  uint8_t internal[128];
} kolo_unique_id_t;

typedef struct kolo_reply *kolo_reply_t;

// Settings of a communicator. Begin with KOLO_CONFIG_INITIALIZER, or with zeros, `size` and `version`: what is zero or NULL is not
// set, and comes from the environment variable of the same name (`KOLO_TIMEOUT`; of `interfaces`, `KOLO_INTERFACE`), then from the launcher, then from a default.
// kolo copies what it needs: all may be freed when the call has returned.
typedef struct kolo_config_t {
  // `sizeof(kolo_config_t)`.
  size_t size;
  // KOLO_CONFIG_VERSION.
  uint32_t version;
  // 1: reductions have the same bits whatever the transport, layout and size; -1: they need not. Rank 0's counts.
  int32_t reproducible;
  // The longest that one operation may take, in milliseconds. The default is 5 minutes.
  uint64_t timeout_ms;
  // The longest that ranks wait for each other when they connect, in milliseconds. The default is 30 seconds.
  uint64_t start_timeout_ms;
  // "auto", "tcp" or "shm". Rank 0's counts.
  const char *transport;
  // How large private buffers pass between processes: "auto", "staged", "streamed" or "cma". Rank 0's counts.
  const char *copy_mode;
  // The algorithm for all operations that have it, such as "ring". Rank 0's counts.
  const char *algorithm;
  // The name of the job, which tells it from others that use the same store.
  const char *job;
  // 64 hexadecimal digits that all ranks know and strangers do not.
  const char *secret;
  // Declares this rank's host: ranks that declare different ones do not share memory.
  const char *host;
  // Which network interfaces or addresses may be used, as in "eth", "=eth0", "^lo,docker", "10.0.0.0/8".
  const char *interfaces;
  // TCP connections that share the work of one link, 1 to 64. Rank 0's counts.
  uint32_t sockets;
  // 1: SIGUSR1 makes a rank write its last operations to `trace_dir`, which kolo handles only then; -1: it does not.
  int32_t trace_signal;
  // Latency between hosts in microseconds, for choosing algorithms; together with `network_gigabytes_per_s`. Rank 0's count.
  double network_latency_us;
  // Gigabytes per second of one host's network interface, for choosing algorithms.
  double network_gigabytes_per_s;
  // A folder where a rank leaves its last operations, for `kolo trace`, when one of them fails.
  const char *trace_dir;
  // 1: a tcp:// store listens to other machines even if the ranks were given no secret: any process that reaches it can join or disturb
  // the job; -1: it does not.
  int32_t insecure;
  // 1: buffers may be in the memory of GPUs; -1: they may not; 0: if kolo was built for it and this machine has a driver. Rank 0's counts.
  int32_t devices;
  // How data in the memory of GPUs gets from one rank to another: "auto" or "staged". Rank 0's counts.
  const char *device_path;
  // A file with the secret, as 64 hexadecimal digits, which belongs to the process's user and which no other user may open. `secret` wins.
  const char *secret_file;
  // PEM files that encrypt links between hosts, all three or none: the certificate of the job's authority, this rank's certificate,
  // which the authority has signed for the name `kolo`, and its private key.
  const char *tls_ca;
  const char *tls_cert;
  const char *tls_key;
} kolo_config_t;

// A key-value store that all ranks share, for kolo_comm_init_callbacks. Keys are printable ASCII of at most 256 bytes, values at most
// 16 MiB of any bytes. What is stored is small and needed only until all ranks have connected.
//
// The functions return 0 if they could do what they should, also if `get` found nothing; any other number ends the start with
// KOLO_ERR_STORE. They must not throw C++ exceptions, and must return by their timeout, in milliseconds.
typedef struct kolo_store_t {
  // `sizeof(kolo_store_t)`.
  size_t size;
  // Whatever the functions need; kolo passes it on.
  void *context;
  // Sets a key, whether it was there or not.
  int32_t (*set)(void *context, const char *key, const void *value, size_t length, uint64_t timeout_ms);
  // Waits until a key is there, at most until the timeout, and gives its value to kolo_store_reply. With a timeout of 0 it looks and
  // does not wait. If the key is not there by then, it returns 0 without a reply.
  int32_t (*get)(void *context, const char *key, uint64_t timeout_ms, kolo_reply_t reply);
  // Sets a key unless it is there, at once as seen by other ranks, and gives the value that is there afterwards to kolo_store_reply.
  // May be NULL: then two processes with the same rank are noticed later.
  int32_t (*claim)(void *context,
                   const char *key,
                   const void *value,
                   size_t length,
                   uint64_t timeout_ms,
                   kolo_reply_t reply);
  // 1: only the ranks of the job can read or write the store, so ranks that were given no secret share one through it. 0: other
  // processes may; then the ranks agree on a secret that a process that only reads the store cannot learn. Rank 0's counts.
  int32_t is_private;
} kolo_store_t;

// The type of an element. The numbers up to 9 are NCCL's.
typedef int32_t kolo_dtype_t;

// How elements of several ranks become one. The numbers up to 4 are NCCL's.
typedef int32_t kolo_redop_t;

// A CUDA stream (`cudaStream_t` or `CUstream`; NULL is the default stream), of calls whose buffers are in the memory of a GPU. Such a
// call takes its turn in the stream: it reads its buffers after what the stream was given before, what the stream is given
// afterwards finds the result, and the call returns at once. That it fails is then said by the next call. (The asynchronous forms
// have the stream go on; kolo_work_wait_on has any stream wait.) Calls on host memory that are given a stream do the same. With NULL
// and host memory, a call returns when it is done.
typedef void *kolo_stream_t;

typedef struct kolo_work *kolo_work_t;

typedef struct kolo_reducer *kolo_reducer_t;

// A parameter or buffer of a model.
typedef struct kolo_tensor_t {
  // What errors call it.
  const char *name;
  // Its dimensions, row-major; may be NULL if there are none.
  const size_t *shape;
  // How many dimensions it has.
  size_t ndim;
  // The type of its elements.
  kolo_dtype_t dtype;
  // 1: it is in the memory of the reducer's device, and so is its gradient. 0: in host memory.
  int32_t on_device;
} kolo_tensor_t;

// What becomes of parameters that get no gradient in a step.
typedef int32_t kolo_unused_t;

// Whether ranks may have different numbers of steps, and what an average is divided by when some have no more.
typedef int32_t kolo_uneven_t;

// How a bucket is reduced.
typedef int32_t kolo_hook_t;

// A bucket in flight: nobody else reads or writes it.
typedef struct kolo_bucket_t {
  // Its place among the buckets, in the order in which they are launched.
  size_t index;
  // How many steps were reduced before this one.
  uint64_t step;
  // Its elements, in memory that the ranks of the host share, or of the device.
  void *data;
  // How many there are.
  size_t count;
  // Their type.
  kolo_dtype_t dtype;
  // Whether they are in the memory of the reducer's device. Then what streams were to write there is done, and what the hook gives
  // to streams must be done when it returns.
  int32_t on_device;
} kolo_bucket_t;

// Replaces a bucket's elements by their average over all ranks, or what stands for it; returns 0, or a number, such as the result of a
// collective, that fails the step and is part of the error. Called on the reducer's thread, for the same buckets in the same order on
// all ranks. It may call collectives on a communicator that nobody else uses meanwhile, such as one that was split off for it. It must
// not call reducers, nor wait for a thread that does: kolo_reducer_... functions return KOLO_ERR_REDUCER there.
typedef int32_t (*kolo_hook_function_t)(void *context, const struct kolo_bucket_t *bucket);

// Options of a reducer, the same on all ranks. Begin with KOLO_REDUCER_CONFIG_INITIALIZER, or with zeros, `size` and
// `version`: what is zero has its default.
typedef struct kolo_reducer_config_t {
  // `sizeof(kolo_reducer_config_t)`.
  size_t size;
  // KOLO_REDUCER_CONFIG_VERSION.
  uint32_t version;
  // What becomes of parameters that get no gradient. Default: KOLO_UNUSED_ERROR.
  kolo_unused_t unused;
  // Whether ranks may have different numbers of steps. Default: KOLO_UNEVEN_NO.
  kolo_uneven_t uneven;
  // 1: buckets start in kolo_reducer_finish, and not as soon as they are full. Ranks may differ in it.
  int32_t no_overlap;
  // 1: buckets are not made anew after the first step.
  int32_t no_rebuild;
  // How a bucket is reduced. Default: KOLO_HOOK_AVERAGE.
  kolo_hook_t hook;
  // How many bytes of gradients go together, at least. Default: 25 MiB.
  size_t bucket_bytes;
  // The same of the first bucket. Default: 1 MiB.
  size_t first_bucket_bytes;
  // The steps after which the hook begins, of those that say so.
  uint64_t hook_start_after;
  // The rank of KOLO_HOOK_POWER_SGD. Default: 1.
  uint32_t hook_rank;
  // The device of the tensors that are on one, by the number under which this process sees it (that of `cudaSetDevice`).
  int32_t device;
  // What KOLO_HOOK_CUSTOM calls.
  kolo_hook_function_t hook_function;
  // What that is given, in every step: what it points to must live until kolo_reducer_destroy has returned.
  void *hook_context;
  // The stream of that device in whose order gradients are written and read there; it must live until kolo_reducer_destroy has
  // returned. NULL: the default stream.
  kolo_stream_t stream;
} kolo_reducer_config_t;

// What the last step that was reduced cost. Set `size` to `sizeof(kolo_step_stats_t)` before kolo_reducer_stats.
typedef struct kolo_step_stats_t {
  // In: the size of this struct as the caller knows it.
  size_t size;
  // How many buckets there were.
  size_t buckets;
  // Bytes of gradients in them.
  uint64_t bytes;
  // From the begin of the step to kolo_reducer_finish, or, where gradients are on a device, to when the last was there; in
  // microseconds.
  uint64_t computed_us;
  // How long kolo_reducer_finish waited.
  uint64_t waited_us;
  // How long buckets were being reduced, in sum.
  uint64_t communicated_us;
  // How much of that was before kolo_reducer_finish was called.
  uint64_t overlapped_us;
} kolo_step_stats_t;

// What one bucket of the last step that was reduced cost. Times are counted from the begin of the step, in microseconds. Set `size` to
// `sizeof(kolo_bucket_stats_t)` before kolo_reducer_bucket_stats.
typedef struct kolo_bucket_stats_t {
  // In: the size of this struct as the caller knows it.
  size_t size;
  // Bytes of gradients in it.
  uint64_t bytes;
  // How many parameters it has.
  size_t parameters;
  // When its last gradient was ready.
  uint64_t ready_us;
  // When its reduction started.
  uint64_t started_us;
  // When it had been reduced.
  uint64_t ended_us;
  // The type of its elements: a KOLO_FLOAT... constant.
  kolo_dtype_t dtype;
} kolo_bucket_stats_t;

// It worked.
#define KOLO_OK 0

// An argument cannot be right: a null pointer, a number that stands for nothing, a root that is no rank. Nothing was sent.
#define KOLO_ERR_ARGUMENT 1

// The handle is null, of something else, or of something that was destroyed.
#define KOLO_ERR_HANDLE 2

// What was asked for cannot be had here.
#define KOLO_ERR_UNSUPPORTED 3

// A rank failed, left, or did not come before the deadline.
#define KOLO_ERR_PEER 4

// Ranks called different things.
#define KOLO_ERR_MISMATCH 5

// One rank sent another number of bytes than the other expected.
#define KOLO_ERR_COUNTS 6

// An earlier operation failed, which ended the communicator.
#define KOLO_ERR_REVOKED 7

// The operation was given up: the communicator was aborted or destroyed.
#define KOLO_ERR_ABORTED 8

// A field of the configuration or an environment variable has a value that it cannot have.
#define KOLO_ERR_SETTING 9

// Nothing told this process its rank and how many there are.
#define KOLO_ERR_NO_LAUNCHER 10

// Ranks did not come to the start in time.
#define KOLO_ERR_MISSING 11

// Ranks were given different numbers of ranks.
#define KOLO_ERR_WORLD_SIZE 12

// Two processes were given the same rank.
#define KOLO_ERR_RANK_TAKEN 13

// Ranks have versions of kolo that do not understand each other.
#define KOLO_ERR_VERSION 14

// The store where ranks find each other did not serve.
#define KOLO_ERR_STORE 15

// The operating system refused something.
#define KOLO_ERR_OS 16

// A defect of kolo. The communicator is ended.
#define KOLO_ERR_INTERNAL 17

// The survivors of a failure went on without this rank, which came too late.
#define KOLO_ERR_EXCLUDED 19

// This process was forked from the one that made the communicator.
#define KOLO_ERR_FORKED 21

// A device, or its driver, failed.
#define KOLO_ERR_DEVICE 22

// No error: the operation has not ended yet.
#define KOLO_IN_PROGRESS 18

// A reducer was used as it cannot be, or ranks gave it different parameters. Communicators stay as usable as they were.
#define KOLO_ERR_REDUCER 20

// The error is about no rank's failure.
#define KOLO_CAUSE_NONE 0

// Its connection ended without a goodbye: it crashed or was killed.
#define KOLO_CAUSE_CLOSED 1

// Its process is gone.
#define KOLO_CAUSE_DIED 2

// It destroyed its communicator in good order.
#define KOLO_CAUSE_LEFT 3

// It did not take part before the deadline.
#define KOLO_CAUSE_SILENT 4

// Its connection broke.
#define KOLO_CAUSE_BROKEN 5

// No connection to it could be made.
#define KOLO_CAUSE_UNREACHABLE 6

// It has another secret.
#define KOLO_CAUSE_SECRET 7

// An operation failed on it. Its own error says what happened.
#define KOLO_CAUSE_REVOKED 8

// It made another call earlier.
#define KOLO_CAUSE_DIVERGED 9

// It sent what no kolo sends.
#define KOLO_CAUSE_CORRUPT 10

// It lives, but did not make the call before the deadline.
#define KOLO_CAUSE_ABSENT 11

// Its process is stopped, by a signal or a debugger.
#define KOLO_CAUSE_STOPPED 12

// Its machine takes connections, but its process says nothing.
#define KOLO_CAUSE_UNRESPONSIVE 13

// Nobody is where it was.
#define KOLO_CAUSE_GONE 14

// It aborted the communicator.
#define KOLO_CAUSE_ABORTED 15

// It called something else than another rank.
#define KOLO_CAUSE_MISMATCH 16

// It sent another number of bytes than another rank expected.
#define KOLO_CAUSE_COUNTS 17

// One of the two does not believe the other's certificate.
#define KOLO_CAUSE_TLS 18

// The error is about no operation.
#define KOLO_OP_NONE -1

#define KOLO_OP_ALL_REDUCE 0

#define KOLO_OP_BROADCAST 1

#define KOLO_OP_BARRIER 2

#define KOLO_OP_REDUCE 3

#define KOLO_OP_ALL_GATHER 4

#define KOLO_OP_ALL_GATHER_V 5

#define KOLO_OP_REDUCE_SCATTER 6

#define KOLO_OP_REDUCE_SCATTER_V 7

#define KOLO_OP_ALL_TO_ALL 8

#define KOLO_OP_ALL_TO_ALL_V 9

#define KOLO_OP_GATHER 10

#define KOLO_OP_SCATTER 11

#define KOLO_OP_SEND 12

#define KOLO_OP_RECV 13

#define KOLO_OP_SPLIT 14

#define KOLO_OP_MEM_ALLOC 15

#define KOLO_OP_CONNECT 16

#define KOLO_INT8 0

#define KOLO_UINT8 1

#define KOLO_INT32 2

#define KOLO_UINT32 3

#define KOLO_INT64 4

#define KOLO_UINT64 5

// IEEE 754 half precision. Summed in `float` and rounded once wherever one rank reduces a piece.
#define KOLO_FLOAT16 6

#define KOLO_FLOAT32 7

#define KOLO_FLOAT64 8

// The upper half of a `float`. Summed as KOLO_FLOAT16 is.
#define KOLO_BFLOAT16 9

#define KOLO_INT16 10

#define KOLO_UINT16 11

// A byte that is 0 or 1; what is not 0 arrives as 1.
#define KOLO_BOOL 12

// The sum; integers wrap around. Not of KOLO_BOOL.
#define KOLO_SUM 0

// The product; integers wrap around. Not of KOLO_BOOL.
#define KOLO_PROD 1

// The largest; NaN if any is NaN.
#define KOLO_MAX 2

// The smallest; NaN if any is NaN.
#define KOLO_MIN 3

// The sum divided by the number of ranks; floating point only.
#define KOLO_AVG 4

// Bitwise and; integers and KOLO_BOOL only.
#define KOLO_BAND 5

// Bitwise or; integers and KOLO_BOOL only.
#define KOLO_BOR 6

// Bitwise exclusive or; integers and KOLO_BOOL only.
#define KOLO_BXOR 7

// kolo_reducer_finish names the first of them, and fails. Those of kolo_reducer_unused are not meant.
#define KOLO_UNUSED_ERROR 0

// Those that are not ready at kolo_reducer_finish count as zeros, and ranks tell each other which ones nobody used.
#define KOLO_UNUSED_FIND 1

// The same in the first step; later ones use the same parameters.
#define KOLO_UNUSED_STATIC 2

// They may not.
#define KOLO_UNEVEN_NO 0

// They may, and averages are still divided by the number of all ranks.
#define KOLO_UNEVEN_BY_ALL 1

// They may, and averages are divided by the number of ranks that made the step.
#define KOLO_UNEVEN_BY_ACTIVE 2

// Averaged.
#define KOLO_HOOK_AVERAGE 0

// Averaged as 16-bit floats.
#define KOLO_HOOK_FLOAT16 1

// Averaged as the upper halves of 32-bit floats.
#define KOLO_HOOK_BFLOAT16 2

// PowerSGD of rank `hook_rank` (Vogels et al. 2019), after `hook_start_after` steps.
#define KOLO_HOOK_POWER_SGD 3

// Local SGD: left as it is after `hook_start_after` steps. The caller calls kolo_reducer_average_parameters now and then.
#define KOLO_HOOK_LOCAL_SGD 4

// What `hook_function` does.
#define KOLO_HOOK_CUSTOM 5

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// The version of the library that is loaded: `10000 * major + 100 * minor + patch`.
uint32_t kolo_version(void);

// Copies the last error into `*error`: of this communicator, whichever thread made the call; or, if `comm` is null, of this
// thread, whatever the call was about. `error->code` is `KOLO_OK` if there was none.
//
// Set `error->size` to `sizeof(kolo_error_t)` first. A call that succeeds leaves the last error as it is.
kolo_result_t kolo_last_error(kolo_comm_t comm,
                              struct kolo_error_t *error);

// What a result means, in a few words. The text is static: it needs no freeing. Of any number, also of one that is no result.
const char *kolo_error_string(kolo_result_t result);

// How long each operation may take that this thread calls or starts from now on, in milliseconds, whatever its communicator was
// made with; 0: as long as that says, as at first. Other threads, and what was called before, are not affected.
//
// It counts for collectives, sends and receives, blocking, started or in a group. kolo_comm_split, kolo_mem_alloc and reducers have as long
// as their communicator says whatever it is; connecting and kolo_comm_shrink have `start_timeout_ms`.
kolo_result_t kolo_call_timeout(uint64_t timeout_ms);

// Makes an id for the ranks of one communicator, and serves in this process what they need to find each other, until they have. One
// process calls this, most often that of rank 0, and hands the id to the others.
//
// The address in it is the one that others reach this host by; `KOLO_INTERFACE` chooses another.
kolo_result_t kolo_get_unique_id(struct kolo_unique_id_t *id);

// Gives kolo the value that a function of kolo_store_t found; kolo copies it. For use inside that function, by the same thread.
kolo_result_t kolo_store_reply(kolo_reply_t reply,
                               const void *value,
                               size_t length);

// Connects with all ranks that a launcher started (kolo run, torchrun, srun, mpirun and others), or makes a communicator of this
// process alone if none did. A collective call: returns when all have connected, or by the start deadline.
//
// `config` may be NULL. `*comm` is to be given to kolo_comm_destroy; it is NULL if this fails.
kolo_result_t kolo_comm_init_env(kolo_comm_t *comm,
                                 const struct kolo_config_t *config);

// As kolo_comm_init_env, for `nranks` ranks that share a unique id: one process made it with kolo_get_unique_id, and handed it to
// the others in a way of its own. That process must live until all have connected.
kolo_result_t kolo_comm_init_rank(kolo_comm_t *comm,
                                  int32_t nranks,
                                  struct kolo_unique_id_t id,
                                  int32_t rank,
                                  const struct kolo_config_t *config);

// As kolo_comm_init_env, for `nranks` ranks that find each other at a store: `file:///path`, `tcp://host:port` (which rank 0 serves),
// `redis://host:port` (if kolo was built with it) or `env://`.
kolo_result_t kolo_comm_init_store(kolo_comm_t *comm,
                                   int32_t nranks,
                                   const char *url,
                                   int32_t rank,
                                   const struct kolo_config_t *config);

// As kolo_comm_init_store, at a store of the caller's own. Its functions are called by this thread, before this returns, and not
// afterwards.
kolo_result_t kolo_comm_init_callbacks(kolo_comm_t *comm,
                                       int32_t nranks,
                                       const struct kolo_store_t *store,
                                       int32_t rank,
                                       const struct kolo_config_t *config);

// Makes `nranks` communicators that are ranks of one group inside this process, one for each of as many threads: `comms[i]` is
// rank i. For tests, and for programs with a thread for each rank. `comms` has room for `nranks` handles,
// of at most 4096.
kolo_result_t kolo_comm_init_all(kolo_comm_t *comms,
                                 int32_t nranks,
                                 const struct kolo_config_t *config);

// Divides the ranks: those that give the same `color` (from 0) become a communicator of their own, in the order of their `key`s,
// and of their ranks where these are equal. With KOLO_NO_COLOR a rank takes part in none, and `*newcomm` becomes NULL.
//
// A collective call of all ranks of `comm`. The new communicator is independent of it, and has the same settings.
kolo_result_t kolo_comm_split(kolo_comm_t comm,
                              int32_t color,
                              int32_t key,
                              kolo_comm_t *newcomm);

// After a failure: `*newcomm` becomes a communicator of the ranks that are left, in the order in which they are in `comm` and with the
// same settings. It is NULL if this fails. `comm` ends, if it has not failed already, and is still to be given to kolo_comm_destroy.
//
// Operations that were started on `comm` fail, and kolo_work_wait says when their buffers are the caller's again. Which operations
// were the last that succeeded may differ between ranks: let them agree on where to go on. Memory of kolo_mem_alloc lives on, and can
// be used. Reducers, and what was split from `comm`, have communicators of their own, and end by themselves if the failed rank is one of
// theirs: make them anew with `*newcomm`.
//
// A collective call of all ranks that want to go on. Ranks that are gone are not waited for; those that are there but do not call
// this have until the start deadline, except that the one whose fault the failure is has a second. KOLO_ERR_EXCLUDED if this rank
// came too late, and the others went on without it.
kolo_result_t kolo_comm_shrink(kolo_comm_t comm,
                               kolo_comm_t *newcomm);

// Gives up what is under way on this communicator, and ends it: calls of other threads and operations that were started fail
// with KOLO_ERR_ABORTED, later ones with KOLO_ERR_REVOKED, and those of the other ranks fail, too. From any thread; returns at once.
// What is under way looks at least every half second. The handle stays valid, to be given to kolo_comm_destroy.
kolo_result_t kolo_comm_abort(kolo_comm_t comm);

// Tells the other ranks that this one has left, and frees the communicator: its handle is dead afterwards. Operations that are
// still under way are given up, as by kolo_comm_abort, so wait for them first; when this returns nothing uses their buffers any more.
// What was split from it, and memory of kolo_mem_alloc, live on.
kolo_result_t kolo_comm_destroy(kolo_comm_t comm);

// Writes the last operations of this rank to a file, for `kolo trace`: those of this communicator and of all that are split from the
// same first one, up to 1024 of each. From any thread, also while operations are under way.
kolo_result_t kolo_comm_dump_trace(kolo_comm_t comm,
                                   const char *path);

// How many ranks there are.
kolo_result_t kolo_comm_count(kolo_comm_t comm, int32_t *count);

// This rank, from 0 to the number of ranks less one.
kolo_result_t kolo_comm_rank(kolo_comm_t comm, int32_t *rank);

// How many hosts the ranks are on.
kolo_result_t kolo_comm_host_count(kolo_comm_t comm, int32_t *count);

// Through what ranks exchange data: "none" (alone), "shm", "tcp" or "shm+tcp". The text is static.
kolo_result_t kolo_comm_transport(kolo_comm_t comm, const char **name);

// Whether this rank's buffers may be in the memory of GPUs: `*has` is 1 or 0. They may if rank 0's `KOLO_DEVICES` says so, this kolo was
// built with the feature `cuda`, and there is a driver here.
kolo_result_t kolo_comm_has_devices(kolo_comm_t comm,
                                    int32_t *has);

// Whether the communicator still works: `*result` is KOLO_OK, or the result of the operation that ended it. Does not wait.
kolo_result_t kolo_comm_get_async_error(kolo_comm_t comm,
                                        kolo_result_t *result);

// Reduces all ranks' `send`, element by element, into everybody's `recv`, of `count` elements each. Every rank gets the same bits.
// In place if `send == recv`. Inside a host, memory of kolo_mem_alloc is read and written where it is.
kolo_result_t kolo_all_reduce(const void *send,
                              void *recv,
                              size_t count,
                              kolo_dtype_t dtype,
                              kolo_redop_t op,
                              kolo_comm_t comm,
                              kolo_stream_t stream);

// As kolo_all_reduce, for the root alone: `recv` of the other ranks is not touched and may be NULL.
kolo_result_t kolo_reduce(const void *send,
                          void *recv,
                          size_t count,
                          kolo_dtype_t dtype,
                          kolo_redop_t op,
                          int32_t root,
                          kolo_comm_t comm,
                          kolo_stream_t stream);

// Copies the root's `send` to everybody's `recv`, of `count` elements each. `send` of the other ranks is not read and may be NULL.
// In place if `send == recv`.
kolo_result_t kolo_broadcast(const void *send,
                             void *recv,
                             size_t count,
                             kolo_dtype_t dtype,
                             int32_t root,
                             kolo_comm_t comm,
                             kolo_stream_t stream);

// Puts all ranks' `send`, of `count` elements each, one after the other in the order of ranks, into everybody's `recv`.
// In place if `send` is this rank's block of `recv`: `recv + rank * count` elements.
kolo_result_t kolo_all_gather(const void *send,
                              void *recv,
                              size_t count,
                              kolo_dtype_t dtype,
                              kolo_comm_t comm,
                              kolo_stream_t stream);

// As kolo_all_gather, where rank i gives `counts[i]` elements. `counts` has an entry for each rank, the same on all ranks; it is
// read before this returns.
kolo_result_t kolo_all_gather_v(const void *send,
                                void *recv,
                                const size_t *counts,
                                kolo_dtype_t dtype,
                                kolo_comm_t comm,
                                kolo_stream_t stream);

// Reduces all ranks' `send`, of one block of `count` elements for each rank, element by element, and gives rank i block i of
// the result as its `recv`. In place if `recv` is this rank's block of `send`: `send + rank * count` elements; the other blocks
// may hold anything afterwards.
kolo_result_t kolo_reduce_scatter(const void *send,
                                  void *recv,
                                  size_t count,
                                  kolo_dtype_t dtype,
                                  kolo_redop_t op,
                                  kolo_comm_t comm,
                                  kolo_stream_t stream);

// As kolo_reduce_scatter, where block i has `counts[i]` elements. `counts` has an entry for each rank, the same on all ranks; it
// is read before this returns.
kolo_result_t kolo_reduce_scatter_v(const void *send,
                                    void *recv,
                                    const size_t *counts,
                                    kolo_dtype_t dtype,
                                    kolo_redop_t op,
                                    kolo_comm_t comm,
                                    kolo_stream_t stream);

// Gives block j of rank i's `send` to rank j, as block i of its `recv`. Blocks have `count` elements, and there is one for each
// rank. In place if `send == recv`.
kolo_result_t kolo_all_to_all(const void *send,
                              void *recv,
                              size_t count,
                              kolo_dtype_t dtype,
                              kolo_comm_t comm,
                              kolo_stream_t stream);

// As kolo_all_to_all, where block j of `send` has `send_counts[j]` elements, and block j of `recv` has `recv_counts[j]`. What one
// rank sends to another must be what the other expects. Both have an entry for each rank, and are read before this returns.
// Not in place.
kolo_result_t kolo_all_to_all_v(const void *send,
                                const size_t *send_counts,
                                void *recv,
                                const size_t *recv_counts,
                                kolo_dtype_t dtype,
                                kolo_comm_t comm,
                                kolo_stream_t stream);

// As kolo_all_gather, for the root alone: `recv` of the other ranks is not touched and may be NULL.
kolo_result_t kolo_gather(const void *send,
                          void *recv,
                          size_t count,
                          kolo_dtype_t dtype,
                          int32_t root,
                          kolo_comm_t comm,
                          kolo_stream_t stream);

// Gives rank i block i of the root's `send`, of `count` elements for each rank, as its `recv`. `send` of the other ranks is not
// read and may be NULL. In place if `recv` is this rank's block of `send`.
kolo_result_t kolo_scatter(const void *send,
                           void *recv,
                           size_t count,
                           kolo_dtype_t dtype,
                           int32_t root,
                           kolo_comm_t comm,
                           kolo_stream_t stream);

// Returns when all ranks have called it.
kolo_result_t kolo_barrier(kolo_comm_t comm, kolo_stream_t stream);

// Sends `count` elements to a rank, which calls kolo_recv with as many of the same type. May return before that rank has called
// it, or not: two ranks that both send first may wait for each other until the deadline. Use a group, kolo_send_recv or
// kolo_start_send for that.
kolo_result_t kolo_send(const void *send,
                        size_t count,
                        kolo_dtype_t dtype,
                        int32_t peer,
                        kolo_comm_t comm,
                        kolo_stream_t stream);

// Receives `count` elements from a rank. Messages of one rank come in the order in which it sent them.
kolo_result_t kolo_recv(void *recv,
                        size_t count,
                        kolo_dtype_t dtype,
                        int32_t peer,
                        kolo_comm_t comm,
                        kolo_stream_t stream);

// Receives `count` elements from whichever rank's message comes first, of those that no earlier receive waits for, and puts that
// rank into `*source` unless it is NULL. Not for groups.
kolo_result_t kolo_recv_any(void *recv,
                            size_t count,
                            kolo_dtype_t dtype,
                            int32_t *source,
                            kolo_comm_t comm,
                            kolo_stream_t stream);

// Sends to one rank and receives from another (or the same) at once.
kolo_result_t kolo_send_recv(const void *send,
                             size_t send_count,
                             int32_t to,
                             void *recv,
                             size_t recv_count,
                             int32_t from,
                             kolo_dtype_t dtype,
                             kolo_comm_t comm,
                             kolo_stream_t stream);

// Waits until an operation has ended, and returns how: KOLO_OK, or why it failed. Every operation has a deadline, so this ends.
// Afterwards its buffers are the caller's again. May be called several times, and by several threads.
kolo_result_t kolo_work_wait(kolo_work_t work);

// As kolo_work_wait, at most for so many milliseconds: KOLO_IN_PROGRESS if it has not ended by then.
kolo_result_t kolo_work_wait_timeout(kolo_work_t work, uint64_t timeout_ms);

// Has a CUDA stream wait until an operation has ended, and returns at once, with KOLO_OK: what the stream is given from then on finds
// the result. If the operation fails, the stream goes on as well, with anything in the buffers; kolo_work_test or kolo_work_wait tell.
// Of operations on host memory that were given no stream, and where streams cannot wait for the host, this is kolo_work_wait.
kolo_result_t kolo_work_wait_on(kolo_work_t work,
                                kolo_stream_t stream);

// Whether an operation has ended: `*done` is 1 or 0. Returns KOLO_OK, or why the operation failed, or what is wrong with the call
// itself. Does not wait.
kolo_result_t kolo_work_test(kolo_work_t work,
                             int32_t *done);

// Gives an operation up, unless it has ended. The other ranks wait for it: so this ends the communicator, as kolo_comm_abort does.
// Returns at once; kolo_work_wait says when the buffers are the caller's again.
kolo_result_t kolo_work_cancel(kolo_work_t work);

// Frees the handle, which is dead afterwards. An operation that has not ended goes on, and uses its buffers until it ends: wait
// first.
kolo_result_t kolo_work_destroy(kolo_work_t work);

// Starts kolo_all_reduce and returns at once. Operations of one communicator take effect in the order of their calls, blocking
// or not. The buffers are the operation's until kolo_work_wait or kolo_work_test has said that it has ended: they must stay valid,
// `recv` must not be touched, and `send` must not be written. `*work` is NULL if this fails; nothing was started then.
kolo_result_t kolo_start_all_reduce(const void *send,
                                    void *recv,
                                    size_t count,
                                    kolo_dtype_t dtype,
                                    kolo_redop_t op,
                                    kolo_comm_t comm,
                                    kolo_stream_t stream,
                                    kolo_work_t *work);

// Starts kolo_reduce.
kolo_result_t kolo_start_reduce(const void *send,
                                void *recv,
                                size_t count,
                                kolo_dtype_t dtype,
                                kolo_redop_t op,
                                int32_t root,
                                kolo_comm_t comm,
                                kolo_stream_t stream,
                                kolo_work_t *work);

// Starts kolo_broadcast.
kolo_result_t kolo_start_broadcast(const void *send,
                                   void *recv,
                                   size_t count,
                                   kolo_dtype_t dtype,
                                   int32_t root,
                                   kolo_comm_t comm,
                                   kolo_stream_t stream,
                                   kolo_work_t *work);

// Starts kolo_all_gather.
kolo_result_t kolo_start_all_gather(const void *send,
                                    void *recv,
                                    size_t count,
                                    kolo_dtype_t dtype,
                                    kolo_comm_t comm,
                                    kolo_stream_t stream,
                                    kolo_work_t *work);

// Starts kolo_all_gather_v.
kolo_result_t kolo_start_all_gather_v(const void *send,
                                      void *recv,
                                      const size_t *counts,
                                      kolo_dtype_t dtype,
                                      kolo_comm_t comm,
                                      kolo_stream_t stream,
                                      kolo_work_t *work);

// Starts kolo_reduce_scatter.
kolo_result_t kolo_start_reduce_scatter(const void *send,
                                        void *recv,
                                        size_t count,
                                        kolo_dtype_t dtype,
                                        kolo_redop_t op,
                                        kolo_comm_t comm,
                                        kolo_stream_t stream,
                                        kolo_work_t *work);

// Starts kolo_reduce_scatter_v.
kolo_result_t kolo_start_reduce_scatter_v(const void *send,
                                          void *recv,
                                          const size_t *counts,
                                          kolo_dtype_t dtype,
                                          kolo_redop_t op,
                                          kolo_comm_t comm,
                                          kolo_stream_t stream,
                                          kolo_work_t *work);

// Starts kolo_all_to_all.
kolo_result_t kolo_start_all_to_all(const void *send,
                                    void *recv,
                                    size_t count,
                                    kolo_dtype_t dtype,
                                    kolo_comm_t comm,
                                    kolo_stream_t stream,
                                    kolo_work_t *work);

// Starts kolo_all_to_all_v.
kolo_result_t kolo_start_all_to_all_v(const void *send,
                                      const size_t *send_counts,
                                      void *recv,
                                      const size_t *recv_counts,
                                      kolo_dtype_t dtype,
                                      kolo_comm_t comm,
                                      kolo_stream_t stream,
                                      kolo_work_t *work);

// Starts kolo_gather.
kolo_result_t kolo_start_gather(const void *send,
                                void *recv,
                                size_t count,
                                kolo_dtype_t dtype,
                                int32_t root,
                                kolo_comm_t comm,
                                kolo_stream_t stream,
                                kolo_work_t *work);

// Starts kolo_scatter.
kolo_result_t kolo_start_scatter(const void *send,
                                 void *recv,
                                 size_t count,
                                 kolo_dtype_t dtype,
                                 int32_t root,
                                 kolo_comm_t comm,
                                 kolo_stream_t stream,
                                 kolo_work_t *work);

// Starts kolo_barrier.
kolo_result_t kolo_start_barrier(kolo_comm_t comm, kolo_stream_t stream, kolo_work_t *work);

// Starts kolo_send. Sends and receives that were started one after the other go on side by side.
kolo_result_t kolo_start_send(const void *send,
                              size_t count,
                              kolo_dtype_t dtype,
                              int32_t peer,
                              kolo_comm_t comm,
                              kolo_stream_t stream,
                              kolo_work_t *work);

// Starts kolo_recv.
kolo_result_t kolo_start_recv(void *recv,
                              size_t count,
                              kolo_dtype_t dtype,
                              int32_t peer,
                              kolo_comm_t comm,
                              kolo_stream_t stream,
                              kolo_work_t *work);

// Starts kolo_recv_any. `*source`, too, is the operation's until it has ended.
kolo_result_t kolo_start_recv_any(void *recv,
                                  size_t count,
                                  kolo_dtype_t dtype,
                                  int32_t *source,
                                  kolo_comm_t comm,
                                  kolo_stream_t stream,
                                  kolo_work_t *work);

// Begins a group: until kolo_group_end, this thread's blocking collectives, sends and receives are held back. They return at once, and
// use their buffers until kolo_group_end returns. Groups may be nested; the outermost counts.
//
// If a call fails, the group is given up: its buffers are the caller's again, and further calls fail until kolo_group_end.
kolo_result_t kolo_group_start(void);

// Ends a group: carries out what was held back, and returns when all of it is done. Sends and receives go on side by side, so that
// none waits for one before it; so do the calls of different communicators. Collectives of one communicator take effect in order.
//
// If any call of this thread has failed since kolo_group_start, whatever it was and whatever handle it was given, none is carried out,
// and this returns KOLO_ERR_ARGUMENT.
// If several fail when they are carried out, this returns the first failure.
kolo_result_t kolo_group_end(void);

// Allocates `bytes` of zeroed memory, aligned to a page, that the ranks of this host share: kolo_all_reduce reads and writes
// such buffers where they are, which is the least that can be moved. Where ranks cannot share memory it is ordinary memory, and everything
// works as well.
//
// A collective call of all ranks of `comm`, with the same number of bytes. `*ptr` is to be given to kolo_mem_free; it is NULL if this
// fails.
kolo_result_t kolo_mem_alloc(void **ptr,
                             size_t bytes,
                             kolo_comm_t comm);

// Frees what kolo_mem_alloc allocated; of NULL, nothing. Not a collective call, and the communicator may be gone. Operations on the
// memory must have ended. In a forked child it leaves the memory, which is the parent's, as it is.
kolo_result_t kolo_mem_free(void *ptr);

// Makes a reducer of all ranks of `comm`, for the `nparameters` parameters of a model in the order in which its forward pass uses
// them, and its `nbuffers` buffers. Compares them with those of the other ranks: if they differ, all ranks get KOLO_ERR_REDUCER with
// the first difference. `config` may be NULL.
//
// A collective call. The reducer has a communicator of its own and a thread; `comm` may be destroyed before it. All that the arguments
// point to may be freed when this returns, but for `config->stream`, and what `config->hook_context` points to: they are used in every
// step, until kolo_reducer_destroy has returned. `*reducer` is to be given to kolo_reducer_destroy; it is NULL if this fails.
kolo_result_t kolo_reducer_create(kolo_reducer_t *reducer,
                                  const struct kolo_tensor_t *parameters,
                                  size_t nparameters,
                                  const struct kolo_tensor_t *buffers,
                                  size_t nbuffers,
                                  const struct kolo_reducer_config_t *config,
                                  kolo_comm_t comm);

// Frees a reducer, and the gradients' memory with it. A step that is under way is given up, which fails those of the other ranks.
kolo_result_t kolo_reducer_destroy(kolo_reducer_t reducer);

// Begins a step, at whose end all ranks have the average of their gradients. A collective call the second time, when buckets are made
// anew and gradients move to other addresses.
kolo_result_t kolo_reducer_begin(kolo_reducer_t reducer);

// Begins a step that is not reduced: its gradients are kept, and the next steps' are to be added to them, until one that
// kolo_reducer_begin began has been finished, which averages the sum. Not a collective call.
kolo_result_t kolo_reducer_accumulate(kolo_reducer_t reducer);

// Where the gradient of a parameter is: `*gradient` points to its elements, in memory that the ranks of the host share, until the
// second kolo_reducer_begin of any rank makes the buckets anew (on a rank that has joined, kolo_reducer_join); from then on for as
// long as the reducer lives.
//
// Of a parameter on the reducer's device it is an address there, for the configuration's stream: what that is given before
// kolo_reducer_ready is in the average, and what it is given after kolo_reducer_finish has returned finds the average.
//
// It may be written between the begin of a step and kolo_reducer_ready, and read, and changed, from the end of the step to the next
// begin. In between it is the reducer's. `*accumulates`, if that is not NULL, becomes 1 if the step's gradient is to be added to
// what is there, else 0.
kolo_result_t kolo_reducer_gradient(kolo_reducer_t reducer,
                                    size_t parameter,
                                    void **gradient,
                                    int32_t *accumulates);

// Says that a gradient is where kolo_reducer_gradient said. From any thread; the bucket that it fills is reduced at once, if it is
// its turn.
kolo_result_t kolo_reducer_ready(kolo_reducer_t reducer,
                                 size_t parameter);

// Says that this step gives a parameter no gradient: it counts as zeros.
kolo_result_t kolo_reducer_unused(kolo_reducer_t reducer, size_t parameter);

// Copies a gradient that lies elsewhere to its place (or adds it to what is there, if the step accumulates), and makes it ready. From
// any thread. `gradient` lies elsewhere: what is in its place already takes kolo_reducer_ready.
//
// A gradient of a parameter on the reducer's device is copied in the order of the configuration's stream, after what that was given
// before, and must stay until the stream has come to it. Its elements are one after the other: `strides` must be NULL.
//
// With `strides`, one for each dimension, in elements, the element of index `[i, j, ...]` is `gradient[i * strides[0] +
// j * strides[1] + ...]`. NULL: the elements are one after the other, row-major.
kolo_result_t kolo_reducer_put(kolo_reducer_t reducer,
                               size_t parameter,
                               const void *gradient,
                               const size_t *strides);

// Ends the step: starts the buckets that have not been, and waits until all are reduced. After kolo_reducer_accumulate nothing is
// reduced. KOLO_ERR_REDUCER names the first gradient that is missing and may not be; the other ranks' steps fail, too.
kolo_result_t kolo_reducer_finish(kolo_reducer_t reducer);

// Takes part in one step of ranks that have input, with zeros: for ranks that have no more, where the configuration's `uneven` says that
// there may be such. `*more` is 1 after such a step, when gradients may be read, and this is to be called again; 0 when no rank has
// input any more.
kolo_result_t kolo_reducer_join(kolo_reducer_t reducer,
                                int32_t *more);

// Which rank made the last step, the lowest of several: `*rank`. When kolo_reducer_join has said that no rank has input any more, its
// buffers are the latest; kolo_reducer_sync_buffers gives them to all.
kolo_result_t kolo_reducer_last(kolo_reducer_t reducer,
                                int32_t *rank);

// Gives all ranks rank 0's values of all parameters: `values` has an address for each, in their order. It overwrites the gradients. A
// collective call.
kolo_result_t kolo_reducer_broadcast_parameters(kolo_reducer_t reducer,
                                                void *const *values);

// The same, but all get the average of their values.
kolo_result_t kolo_reducer_average_parameters(kolo_reducer_t reducer, void *const *values);

// Makes all ranks' buffers those of rank `from`, or their average if that is KOLO_SYNC_AVERAGE. `values` has an address for each,
// in their order. A collective call.
kolo_result_t kolo_reducer_sync_buffers(kolo_reducer_t reducer,
                                        void *const *values,
                                        int32_t from);

// Whether a parameter got a gradient in the last step, on any rank (with KOLO_UNUSED_ERROR, on this one): `*used` is 1 or 0.
// KOLO_ERR_REDUCER if there is no such parameter.
kolo_result_t kolo_reducer_is_used(kolo_reducer_t reducer,
                                   size_t parameter,
                                   int32_t *used);

// What the last step that was reduced cost.
kolo_result_t kolo_reducer_stats(kolo_reducer_t reducer, struct kolo_step_stats_t *stats);

// What one bucket of the last step that was reduced cost: `bucket` is less than `buckets` of kolo_reducer_stats, in the order in
// which they were started.
kolo_result_t kolo_reducer_bucket_stats(kolo_reducer_t reducer,
                                        size_t bucket,
                                        struct kolo_bucket_stats_t *stats);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* KOLO_H */
