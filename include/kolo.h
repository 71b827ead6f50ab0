/* kolo: collective communication for processes. https://docs.rs/kolo explains the operations.
 *
 * Generated from capi/src; do not edit.
 *
 * Errors. A function that returns a kolo_result_t returns KOLO_OK, which is 0, or why it failed.
 * kolo_last_error then names the rank at fault and says what to do. No call hangs: every wait has a
 * deadline. KOLO_ERR_ARGUMENT, KOLO_ERR_HANDLE, KOLO_ERR_SETTING, KOLO_ERR_UNSUPPORTED and
 * KOLO_ERR_REDUCER leave the communicator as usable as before. Any other error of an operation ends
 * the communicator on all ranks, and later calls return KOLO_ERR_REVOKED. The field `usable` of
 * kolo_error_t tells the two apart. After the end of a communicator, call kolo_comm_shrink, which
 * makes a new one of the surviving ranks, and kolo_comm_destroy.
 *
 * Handles (kolo_comm_t, kolo_work_t, kolo_reducer_t) are numbers, not addresses. A handle that is
 * NULL, of another kind or destroyed is an error and does no harm.
 *
 * Buffers belong to the caller. A blocking call uses them until it returns, a call in a group until
 * kolo_group_end returns, and a nonblocking call until kolo_work_wait or kolo_work_test reports its
 * end. Counts are in elements and may be 0. A buffer of 0 elements may be NULL. Pointers must be
 * aligned to the element. Send and receive buffers do not overlap, unless they are in place as each
 * call describes.
 *
 * Threads. Any thread may call any function at any time. All ranks make the same calls on a
 * communicator in the same order, so the program must order the collectives of several threads on
 * one communicator; they are executed one after the other. Messages of several threads run side by
 * side: while one thread waits in kolo_recv, another can send and receive. A collective waits until
 * messages that were begun before it have ended. A group belongs to its thread.
 *
 * Signals and forks. No function is async-signal-safe: do not call kolo from a signal handler. To
 * end a call that waits, let the handler set a flag for the function of kolo_set_wait_check, or wake
 * another thread that calls kolo_comm_abort. A communicator is not for the child of a fork.
 *
 * Units. Ranks, roots, colors: int32_t. Counts: size_t, in elements; memory in bytes. Times: as the
 * names say (_ms, _us).
 */

#ifndef KOLO_H
#define KOLO_H

#include <stddef.h>
#include <stdint.h>

// The initial value of a kolo_config_t: `kolo_config_t config = KOLO_CONFIG_INITIALIZER;`
#define KOLO_CONFIG_INITIALIZER \
  { sizeof(kolo_config_t), KOLO_CONFIG_VERSION, 0, 0, 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 0, 0, 0.0, 0.0, NULL, 0, 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 0, NULL, NULL, 0 }

// The initial value of a kolo_reducer_config_t.
#define KOLO_REDUCER_CONFIG_INITIALIZER \
  { sizeof(kolo_reducer_config_t), KOLO_REDUCER_CONFIG_VERSION, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, NULL, NULL, NULL }

// The initial value of a kolo_error_t, before kolo_last_error.
#define KOLO_ERROR_INITIALIZER \
  { sizeof(kolo_error_t), 0, 0, 0, 0, 0, 0, 0, 0, { 0 }, { 0 } }

// The version of this header, and of the library that it comes with.
#define KOLO_VERSION_MAJOR 0

#define KOLO_VERSION_MINOR 1

#define KOLO_VERSION_PATCH 0

// The version as one number: `10000 * major + 100 * minor + patch`.
#define KOLO_VERSION (((KOLO_VERSION_MAJOR * 10000) + (KOLO_VERSION_MINOR * 100)) + KOLO_VERSION_PATCH)

// The version of kolo_config_t in this header.
#define KOLO_CONFIG_VERSION 1

// The color of a rank that becomes a member of no communicator in kolo_comm_split.
#define KOLO_NO_COLOR -1

// The version of kolo_reducer_config_t in this header.
#define KOLO_REDUCER_CONFIG_VERSION 1

// For kolo_reducer_sync_buffers: floating-point buffers become their average over all ranks.
#define KOLO_SYNC_AVERAGE -1

// A communicator: one rank's membership in a group of ranks. It is a handle, a number and not an
// address, and may be copied.
typedef struct kolo_comm kolo_comm;

// A gradient reducer, for data-parallel training. It is a handle, a number and not an address, and
// may be copied.
typedef struct kolo_reducer kolo_reducer;

// A handle with which a function of kolo_store_t returns a value, by kolo_store_reply. It is valid
// until the function returns.
typedef struct kolo_reply kolo_reply;

// An operation in flight. It is a handle, which the caller passes to kolo_work_destroy.
typedef struct kolo_work kolo_work;

// The result of a call: `KOLO_OK`, or why it failed.
typedef int32_t kolo_result_t;

typedef struct kolo_comm *kolo_comm_t;

// How a rank failed.
typedef int32_t kolo_cause_t;

// An operation, as errors name it.
typedef int32_t kolo_op_t;

// All that is known about an error. Initialize it with KOLO_ERROR_INITIALIZER, or set `size`,
// before kolo_last_error.
typedef struct kolo_error_t {
  // In: the `sizeof` of this struct in the caller's header.
  size_t size;
  // The result of the call; `KOLO_OK` if no call has failed.
  kolo_result_t code;
  // Whether the communicator can still be used: 1 or 0.
  int32_t usable;
  // The rank at fault, in the communicator of the call; the lowest of several ranks; -1 if no
  // rank is at fault or it is not known.
  int32_t rank;
  // How that rank failed.
  kolo_cause_t cause;
  // The operation that failed.
  kolo_op_t op;
  // The process id of the rank at fault, on its host; 0 if not known.
  uint32_t pid;
  // The sequence number of the operation in its communicator. A send or a receive counts the
  // messages between the two ranks.
  uint64_t seq;
  // How long the operation had been running, in microseconds; 0 if not known.
  uint64_t after_us;
  // The name of the host of the rank at fault; empty if not known.
  char host[256];
  // A message in UTF-8: what happened, which rank is at fault, and what to do.
  char message[2048];
} kolo_error_t;

// The type of an element. The numbers up to 9 are NCCL's.
typedef int32_t kolo_dtype_t;

// What all ranks of kolo_comm_init_rank share. It contains the secret of the job: pass it to ranks
// only. It can be copied, and is valid for one communicator.
typedef struct kolo_unique_id_t {
  uint8_t internal[128];
} kolo_unique_id_t;

typedef struct kolo_reply *kolo_reply_t;

// Settings of a communicator. Initialize it with KOLO_CONFIG_INITIALIZER, or with zeros, `size`
// and `version`. A field that is zero or NULL is not set: its value comes from the environment
// variable of the same name (`KOLO_TIMEOUT`; for `interfaces`, `KOLO_INTERFACE`), then from the
// launcher, then from a default. kolo copies what it needs: the caller may free everything when
// the call has returned.
typedef struct kolo_config_t {
  // `sizeof(kolo_config_t)`.
  size_t size;
  // KOLO_CONFIG_VERSION.
  uint32_t version;
  // 1: reductions have the same bits whatever the transport, layout and size. -1: they need not.
  // All ranks use rank 0's value.
  int32_t reproducible;
  // The timeout of one operation, in milliseconds. Default: 5 minutes.
  uint64_t timeout_ms;
  // How long ranks wait for each other when they connect, in milliseconds. Default: 30 seconds.
  uint64_t start_timeout_ms;
  // "auto", "tcp" or "shm". All ranks use rank 0's value.
  const char *transport;
  // How large private buffers and messages are copied between processes: "auto", "staged",
  // "streamed" or "cma" (messages as with "auto"). All ranks use rank 0's value.
  const char *copy_mode;
  // The algorithm for all operations that have it, such as "ring". All ranks use rank 0's value.
  const char *algorithm;
  // The name of the job. It distinguishes jobs that use the same store.
  const char *job;
  // The secret of the job: 64 hexadecimal digits, the same on all ranks.
  const char *secret;
  // The name of this rank's host. Ranks with different names do not share memory.
  const char *host;
  // The network interfaces or addresses that may be used, as in "eth", "=eth0", "^lo,docker",
  // "10.0.0.0/8".
  const char *interfaces;
  // The number of TCP connections of one link, 1 to 64. All ranks use rank 0's value.
  uint32_t sockets;
  // 1: kolo handles SIGUSR1, which makes a rank write its last operations to `trace_dir`. -1: it
  // does not.
  int32_t trace_signal;
  // Latency between hosts in microseconds, for choosing algorithms. Set both this and
  // `network_gigabytes_per_s`. All ranks use rank 0's values.
  double network_latency_us;
  // Rate of one host's network interface in gigabytes per second, for choosing algorithms.
  double network_gigabytes_per_s;
  // A folder to which a rank writes its last operations when one of them fails, for `kolo
  // trace`.
  const char *trace_dir;
  // 1: a tcp:// store accepts other machines even without a secret: any process that reaches it
  // can join or disturb the job. -1: it does not.
  int32_t insecure;
  // 1: buffers may be in the memory of GPUs. -1: they may not. 0: they may if the machine has a
  // driver. All ranks use rank 0's value. Every rank's kolo needs the feature `cuda`.
  int32_t devices;
  // How data moves between the memory of GPUs: "auto" or "staged". All ranks use rank 0's value.
  const char *device_path;
  // A file with the secret as 64 hexadecimal digits. The file belongs to the user of the
  // process, and no other user may open it. `secret` takes precedence.
  const char *secret_file;
  // PEM files for encrypted links between hosts, all three or none: the certificate of the job's
  // authority, this rank's certificate, which the authority has signed for the name `kolo`, and
  // its private key.
  const char *tls_ca;
  const char *tls_cert;
  const char *tls_key;
  // How ranks of a host learn that all have reached a phase: "auto", "flat" or "hierarchy". All
  // ranks use rank 0's value.
  const char *flag_layout;
  // Where ranks that each have a GPU of their own wait for each other, in a large operation on buffers
  // that are open to all of them: "kernels" or "host". All ranks use rank 0's value.
  const char *device_waits;
  // How elements of messages between hosts are written, in sums and averages of 16 KiB or more:
  // "f32" as in the buffers, those of f32 as "bf16" or "f16", or those of f32, f16 and bf16 in 8
  // bits, as "int8" or "f8e4m3". All ranks use rank 0's value.
  const char *wire_dtype;
  // A folder where the lowest rank of each machine writes a file by which `kolo top` finds the
  // job. Only its user can open the file, which holds the secret of the job.
  const char *top_dir;
  // Where this rank serves metrics as Prometheus text: "127.0.0.1:9400", whose port is that of
  // the first rank of a machine, or "unix:/run/kolo-{rank}.sock".
  const char *metrics;
  // The ports at which this process listens, for firewalls, as in "20000-20100". All ranks have the
  // same range, with one port for every rank of a host and one more for the store, or two for
  // every rank if the job grows.
  const char *ports;
  // The congestion control of this rank's TCP connections, for what it sends: "auto", "system", or
  // a name that the system knows, such as "cubic".
  const char *congestion_control;
  // 1: this process joins a job that has started, as a further rank, when the ranks of the job
  // call kolo_comm_grow. It has no rank and no number of ranks: connect with kolo_comm_init_env.
  // -1: it does not.
  int32_t join;
  // Where this rank's host is in the network: a path such as "rack7" or "pod1/rack7".
  const char *topology;
  // The network interfaces over which links to other hosts are striped, as in "eth0,eth1". A link
  // goes on if one of them fails.
  const char *rails;
  // The seed with which messages of 8 bits are rounded at random. 0: to the nearest. All ranks use
  // rank 0's value.
  uint32_t wire_seed;
} kolo_config_t;

// A key-value store of the program that all ranks share, for kolo_comm_init_callbacks. A key has
// at most 256 bytes of printable ASCII, a value at most 16 MiB of any bytes. Values are needed
// until all ranks have connected.
//
// The functions return 0 on success, also if `get` found nothing. Any other number ends the start
// with KOLO_ERR_STORE. They must not throw C++ exceptions, and must return before their timeout,
// in milliseconds.
typedef struct kolo_store_t {
  // `sizeof(kolo_store_t)`.
  size_t size;
  // An argument that kolo passes to each function.
  void *context;
  // Sets a key, whether it is set already or not.
  int32_t (*set)(void *context, const char *key, const void *value, size_t length, uint64_t timeout_ms);
  // Waits until a key is set, at most until the timeout, and passes its value to
  // kolo_store_reply. With a timeout of 0 it does not wait. If the key is not set by then, it
  // returns 0 without a reply.
  int32_t (*get)(void *context, const char *key, uint64_t timeout_ms, kolo_reply_t reply);
  // Sets a key unless it is set, atomically, and passes the value that it has afterwards to
  // kolo_store_reply. May be NULL: then two processes with the same rank are detected later.
  int32_t (*claim)(void *context,
                   const char *key,
                   const void *value,
                   size_t length,
                   uint64_t timeout_ms,
                   kolo_reply_t reply);
  // 1: only the ranks of the job can read or write the store. Ranks without a secret then share
  // one through it. 0: other processes may read or write it. Ranks without a secret then agree
  // on one that a process that only reads the store cannot learn. All ranks use rank 0's value.
  int32_t is_private;
} kolo_store_t;

// What a communicator has done so far, on this rank: how many operations on the memory of GPUs took
// each path. Set `size` to `sizeof(kolo_comm_stats_t)` before kolo_comm_stats.
typedef struct kolo_comm_stats_t {
  // In: the `sizeof` of this struct in the caller's header.
  size_t size;
  // As a whole through host memory: short operations, and messages.
  uint64_t device_whole;
  // In rounds through host memory.
  uint64_t device_staged;
  // By kernels, with the buffers of all ranks where they are.
  uint64_t device_in_place;
  // By kernels, with data of at least one rank in its area on the GPU.
  uint64_t device_through_areas;
  // As a whole through host memory, copied while the call waits, because streams cannot wait for
  // the host.
  uint64_t device_copied;
  // By one kernel of each rank, which copies what the rank sends to a slot, and reduces the slots of
  // all ranks.
  uint64_t device_one_shot;
} kolo_comm_stats_t;

// A reduction of the elements of several ranks. The numbers up to 4 are NCCL's.
typedef int32_t kolo_redop_t;

// A CUDA stream (`cudaStream_t` or `CUstream`) for calls with buffers in the memory of a GPU; NULL
// is the default stream. Such a call is enqueued on the stream and returns at once; the first call
// of more than 64 KiB on a communicator waits for the other ranks. It reads its buffers after the
// earlier work of the stream, and later work of the stream finds the result. If it fails, the next
// call reports the error. A nonblocking call does not make the stream wait for
// the result; kolo_work_wait_on makes any stream wait. A call on host memory with a stream behaves
// the same way. With NULL and host memory, a call returns when it is done. The stream must live
// until the call has returned; in a group, until kolo_group_end has.
//
// If a CUDA graph captures the stream's work, the call runs with each replay, on all ranks. A call
// of more than 64 KiB waits for the other ranks at the capture.
typedef void *kolo_stream_t;

typedef struct kolo_work *kolo_work_t;

// A function for kolo_work_on_done. `result`: how the operation ended, as kolo_work_wait returns
// it. kolo_last_error tells more, on this thread.
typedef void (*kolo_done_function_t)(void *context, kolo_result_t result);

// A function for kolo_set_wait_check. 0: the wait goes on.
typedef int32_t (*kolo_wait_check_t)(void *context);

typedef struct kolo_reducer *kolo_reducer_t;

// A parameter or buffer of a model.
typedef struct kolo_tensor_t {
  // Its name in errors.
  const char *name;
  // Its dimensions, row-major; may be NULL if there are none.
  const size_t *shape;
  // How many dimensions it has.
  size_t ndim;
  // The type of its elements.
  kolo_dtype_t dtype;
  // 1: it and its gradient are in the memory of the reducer's device. 0: they are in host
  // memory.
  int32_t on_device;
} kolo_tensor_t;

// How a step treats parameters without a gradient.
typedef int32_t kolo_unused_t;

// Whether ranks may have different numbers of steps, and the divisor of averages when some ranks
// have no more.
typedef int32_t kolo_uneven_t;

// How a bucket is reduced.
typedef int32_t kolo_hook_t;

// A bucket in flight. Only the hook reads and writes it.
typedef struct kolo_bucket_t {
  // Its index in the order in which buckets are started.
  size_t index;
  // The number of steps that were reduced before this one.
  uint64_t step;
  // Its elements, in memory that the ranks of the host share, or on the device.
  void *data;
  // The number of elements.
  size_t count;
  // The type of the elements.
  kolo_dtype_t dtype;
  // 1: the elements are in the memory of the reducer's device; 0: on the host. On the device,
  // all earlier writes have ended, and the hook must wait for its own work before it returns.
  int32_t on_device;
} kolo_bucket_t;

// Replaces a bucket's elements by their average over all ranks, or an approximation of it. It
// returns 0 on success. Any other number, such as the result of a collective, fails the step and
// is part of the error. The reducer's thread calls it for the same buckets in the same order on
// all ranks. It may call collectives on a communicator that no other thread uses meanwhile, such
// as one made for it by kolo_comm_split. It must not call reducers, or wait for a thread that
// does: kolo_reducer_... functions return KOLO_ERR_REDUCER there.
typedef int32_t (*kolo_hook_function_t)(void *context, const struct kolo_bucket_t *bucket);

// Options of a reducer, the same on all ranks. Initialize it with KOLO_REDUCER_CONFIG_INITIALIZER,
// or with zeros, `size` and `version`. A field that is zero has its default.
typedef struct kolo_reducer_config_t {
  // `sizeof(kolo_reducer_config_t)`.
  size_t size;
  // KOLO_REDUCER_CONFIG_VERSION.
  uint32_t version;
  // How a step treats parameters without a gradient. Default: KOLO_UNUSED_ERROR.
  kolo_unused_t unused;
  // Whether ranks may have different numbers of steps. Default: KOLO_UNEVEN_NO.
  kolo_uneven_t uneven;
  // 1: buckets start in kolo_reducer_finish, and not as soon as they are full. Ranks may have
  // different values.
  int32_t no_overlap;
  // 1: buckets are not rebuilt after the first step.
  int32_t no_rebuild;
  // How a bucket is reduced. Default: KOLO_HOOK_AVERAGE.
  kolo_hook_t hook;
  // The least number of bytes of a bucket. Default: 25 MiB.
  size_t bucket_bytes;
  // The least number of bytes of the first bucket. Default: 1 MiB.
  size_t first_bucket_bytes;
  // The number of steps after which the hook begins, for the hooks that have it.
  uint64_t hook_start_after;
  // The rank of KOLO_HOOK_POWER_SGD. Default: 1.
  uint32_t hook_rank;
  // The device of the tensors that are on a device: its number in this process, as for
  // `cudaSetDevice`.
  int32_t device;
  // The function of KOLO_HOOK_CUSTOM.
  kolo_hook_function_t hook_function;
  // The first argument of `hook_function`. What it points to must live until
  // kolo_reducer_destroy has returned.
  void *hook_context;
  // The stream of that device in whose order gradients are written and read. It must live until
  // kolo_reducer_destroy has returned. NULL: the default stream.
  kolo_stream_t stream;
} kolo_reducer_config_t;

// The costs of the last step that was reduced. Set `size` to `sizeof(kolo_step_stats_t)` before
// kolo_reducer_stats.
typedef struct kolo_step_stats_t {
  // In: the `sizeof` of this struct in the caller's header.
  size_t size;
  // The number of buckets.
  size_t buckets;
  // Bytes of gradients in all buckets.
  uint64_t bytes;
  // Time from the start of the step to kolo_reducer_finish; if gradients are on a device, to the
  // last gradient. In microseconds.
  uint64_t computed_us;
  // How long kolo_reducer_finish waited, in microseconds.
  uint64_t waited_us;
  // The sum of the times in which buckets were reduced, in microseconds.
  uint64_t communicated_us;
  // The part of that before kolo_reducer_finish was called, in microseconds.
  uint64_t overlapped_us;
} kolo_step_stats_t;

// The costs of one bucket of the last step that was reduced. Times are in microseconds from the
// begin of the step. Set `size` to `sizeof(kolo_bucket_stats_t)` before kolo_reducer_bucket_stats.
typedef struct kolo_bucket_stats_t {
  // In: the `sizeof` of this struct in the caller's header.
  size_t size;
  // Bytes of gradients in the bucket.
  uint64_t bytes;
  // The number of parameters in the bucket.
  size_t parameters;
  // When the last gradient was ready.
  uint64_t ready_us;
  // When the reduction started.
  uint64_t started_us;
  // When the reduction ended.
  uint64_t ended_us;
  // The type of the elements: a KOLO_FLOAT... constant.
  kolo_dtype_t dtype;
} kolo_bucket_stats_t;

// Success.
#define KOLO_OK 0

// An argument is wrong: a null pointer, an unknown number, a root that is not a rank. Nothing was
// sent.
#define KOLO_ERR_ARGUMENT 1

// The handle is null, was made for another kind of object, or was destroyed.
#define KOLO_ERR_HANDLE 2

// The request is not supported here.
#define KOLO_ERR_UNSUPPORTED 3

// A rank failed, left, or did not take part before the deadline.
#define KOLO_ERR_PEER 4

// Ranks made different calls.
#define KOLO_ERR_MISMATCH 5

// A rank sent a different number of bytes than its peer expected.
#define KOLO_ERR_COUNTS 6

// An earlier operation failed, which ended the communicator.
#define KOLO_ERR_REVOKED 7

// The operation was cancelled: the communicator was aborted or destroyed.
#define KOLO_ERR_ABORTED 8

// A field of the configuration or an environment variable has an invalid value.
#define KOLO_ERR_SETTING 9

// No launcher told this process its rank and the number of ranks.
#define KOLO_ERR_NO_LAUNCHER 10

// Ranks did not connect before the start deadline.
#define KOLO_ERR_MISSING 11

// Ranks were given different numbers of ranks.
#define KOLO_ERR_WORLD_SIZE 12

// Two processes were given the same rank.
#define KOLO_ERR_RANK_TAKEN 13

// Ranks have versions of kolo that do not understand each other, or the program was compiled with
// the header of another version.
#define KOLO_ERR_VERSION 14

// The store where ranks find each other failed.
#define KOLO_ERR_STORE 15

// A call to the operating system failed.
#define KOLO_ERR_OS 16

// A defect of kolo. It ended the communicator.
#define KOLO_ERR_INTERNAL 17

// The survivors of a failure continued without this rank, which called too late.
#define KOLO_ERR_EXCLUDED 19

// This process was forked from the one that made the communicator.
#define KOLO_ERR_FORKED 21

// A device or its driver failed.
#define KOLO_ERR_DEVICE 22

// kolo_comm_grow did not admit the newcomers that it found. The communicator stays as it was.
#define KOLO_ERR_NOT_GROWN 23

// The ranks of the job did not admit this process, which was to join them.
#define KOLO_ERR_NOT_ADMITTED 24

// A rank had no memory for what it was about to allocate. In a call of all ranks, all return this,
// and none keeps any of it.
#define KOLO_ERR_NO_MEMORY 25

// No error: the operation has not ended yet.
#define KOLO_IN_PROGRESS 18

// A reducer was used wrongly, or ranks gave it different parameters. Communicators stay as usable
// as they were.
#define KOLO_ERR_REDUCER 20

// The error is not about the failure of a rank.
#define KOLO_CAUSE_NONE 0

// Its connection closed without a goodbye: it crashed or was killed.
#define KOLO_CAUSE_CLOSED 1

// Its process is gone.
#define KOLO_CAUSE_DIED 2

// It destroyed its communicator.
#define KOLO_CAUSE_LEFT 3

// It did not take part before the deadline.
#define KOLO_CAUSE_SILENT 4

// Its connection broke.
#define KOLO_CAUSE_BROKEN 5

// No connection to it could be made.
#define KOLO_CAUSE_UNREACHABLE 6

// It has a different secret.
#define KOLO_CAUSE_SECRET 7

// An operation failed on it. Its own error says what happened.
#define KOLO_CAUSE_REVOKED 8

// It made a different call earlier.
#define KOLO_CAUSE_DIVERGED 9

// It sent data that violates the protocol.
#define KOLO_CAUSE_CORRUPT 10

// It is alive, but did not make the call before the deadline.
#define KOLO_CAUSE_ABSENT 11

// Its process is stopped, by a signal or a debugger.
#define KOLO_CAUSE_STOPPED 12

// Its host accepts connections, but its process does not answer.
#define KOLO_CAUSE_UNRESPONSIVE 13

// No process is at its address any more.
#define KOLO_CAUSE_GONE 14

// It aborted the communicator.
#define KOLO_CAUSE_ABORTED 15

// It made a different call than another rank.
#define KOLO_CAUSE_MISMATCH 16

// It sent a different number of bytes than another rank expected.
#define KOLO_CAUSE_COUNTS 17

// One of the two ranks rejected the other's certificate.
#define KOLO_CAUSE_TLS 18

// A thread of it panicked.
#define KOLO_CAUSE_PANICKED 19

// A system call failed on it.
#define KOLO_CAUSE_FAILED 20

// It called kolo_comm_shrink, and no rank had reported a failure.
#define KOLO_CAUSE_SHRINKS 21

// It sent no message with the tag of a receive before the deadline, but others wait. Or it is this
// rank itself, and a message to itself was not received or not sent. Or its part of a collective is
// behind messages for which there is no room.
#define KOLO_CAUSE_UNMATCHED 22

// The error is not about an operation.
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

#define KOLO_OP_GROW 17

#define KOLO_INT8 0

#define KOLO_UINT8 1

#define KOLO_INT32 2

#define KOLO_UINT32 3

#define KOLO_INT64 4

#define KOLO_UINT64 5

// IEEE 754 half precision. Sums accumulate in `float` and round once wherever one rank reduces a
// segment.
#define KOLO_FLOAT16 6

#define KOLO_FLOAT32 7

#define KOLO_FLOAT64 8

// The upper half of a `float`. Sums accumulate as those of KOLO_FLOAT16.
#define KOLO_BFLOAT16 9

#define KOLO_INT16 10

#define KOLO_UINT16 11

// A byte that is 0 or 1. Any other byte arrives as 1.
#define KOLO_BOOL 12

// Four bits of exponent, three of mantissa, no infinities: PyTorch's float8_e4m3fn, NCCL's
// ncclFloat8e4m3. Sums accumulate as those of KOLO_FLOAT16. What rounds to more than 448, the
// largest number, becomes 448.
#define KOLO_FLOAT8_E4M3 13

// Five bits of exponent, two of mantissa: PyTorch's float8_e5m2, NCCL's ncclFloat8e5m2. Sums
// accumulate as those of KOLO_FLOAT16. What rounds to more than 57344, the largest number, is an
// infinity.
#define KOLO_FLOAT8_E5M2 14

// The sum; integers wrap around. Not for KOLO_BOOL.
#define KOLO_SUM 0

// The product; integers wrap around. Not for KOLO_BOOL.
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

// kolo_reducer_finish fails and names the first such parameter, unless kolo_reducer_unused was
// called for it.
#define KOLO_UNUSED_ERROR 0

// Gradients that are not ready at kolo_reducer_finish count as zeros. Ranks tell each other which
// parameters no rank used.
#define KOLO_UNUSED_FIND 1

// As KOLO_UNUSED_FIND in the first step. Later steps use the same parameters.
#define KOLO_UNUSED_STATIC 2

// They may not.
#define KOLO_UNEVEN_NO 0

// They may. Averages are divided by the number of all ranks.
#define KOLO_UNEVEN_BY_ALL 1

// They may. Averages are divided by the number of ranks that made the step.
#define KOLO_UNEVEN_BY_ACTIVE 2

// By averaging it.
#define KOLO_HOOK_AVERAGE 0

// By averaging it in KOLO_FLOAT16.
#define KOLO_HOOK_FLOAT16 1

// By averaging it in KOLO_BFLOAT16.
#define KOLO_HOOK_BFLOAT16 2

// By PowerSGD of rank `hook_rank` (Vogels et al. 2019), after `hook_start_after` steps.
#define KOLO_HOOK_POWER_SGD 3

// By local SGD: it is not reduced after `hook_start_after` steps. The caller calls
// kolo_reducer_average_parameters every few steps.
#define KOLO_HOOK_LOCAL_SGD 4

// By `hook_function`.
#define KOLO_HOOK_CUSTOM 5

// By averaging it in messages of fewer bits between hosts (`wire_dtype`), with what they left out
// added in the next step.
#define KOLO_HOOK_ERROR_FEEDBACK 6

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Returns the version of the loaded library, as KOLO_VERSION is that of the header.
uint32_t kolo_version(void);

// Returns KOLO_OK if a program that was compiled with the header of the version `header` can use
// the loaded library, otherwise KOLO_ERR_VERSION: the two have different ABIs. Pass KOLO_VERSION.
//
// Programs in C and C++ need not call it, because the functions that make a communicator
// (kolo_comm_init_env and the others) are also macros, which call it first. A program that loads
// the library with dlopen, or from another language, calls it before any other function.
kolo_result_t kolo_check_version(uint32_t header);

// Copies the last error into `*error`. With a communicator, it is the last error on that
// communicator, from any thread. If `comm` is NULL, it is the last error of this thread.
// `error->code` is `KOLO_OK` if there was none.
//
// Set `error->size` to `sizeof(kolo_error_t)` first. A call that succeeds leaves the last error as
// it is.
kolo_result_t kolo_last_error(kolo_comm_t comm, struct kolo_error_t *error);

// Returns the meaning of a result in a few words, for any number. The text is static: do not free
// it.
const char *kolo_error_string(kolo_result_t result);

// Writes the bytes of an element of a type to `*size`. KOLO_ERR_ARGUMENT if `of` is no type or
// `size` is NULL; `*size` then stays as it is.
kolo_result_t kolo_dtype_size(kolo_dtype_t of, size_t *size);

// Sets the timeout, in milliseconds, of the operations that this thread calls or starts from now
// on. It replaces the timeout of their communicators; 0 restores that. Other threads and earlier
// calls are not affected.
//
// It applies to collectives, sends and receives: blocking, nonblocking or in a group.
// kolo_comm_split, kolo_mem_alloc and reducers always use the timeout of their communicator.
// Connecting and kolo_comm_shrink use `start_timeout_ms`.
kolo_result_t kolo_call_timeout(uint64_t timeout_ms);

// Makes an id for the ranks of one communicator. One process calls this, usually that of rank 0,
// and passes the id to the other ranks. This process serves the store of the start until all ranks
// have connected.
//
// The id contains the address of this host; `KOLO_INTERFACE` chooses the interface.
kolo_result_t kolo_get_unique_id(struct kolo_unique_id_t *id);

// Stops serving the store of an id that this process has made and that no communicator will use.
// Any other id has no effect.
kolo_result_t kolo_discard_unique_id(const struct kolo_unique_id_t *id);

// Passes the value that a function of kolo_store_t found to kolo, which copies it. Only for use
// inside that function, by the same thread.
kolo_result_t kolo_store_reply(kolo_reply_t reply, const void *value, size_t length);

// Connects with all ranks that a launcher started (kolo run, torchrun, srun, mpirun and others).
// Without a launcher, it makes a communicator of this process alone. A collective call: it returns
// when all ranks have connected, or at the start deadline.
//
// `config` may be NULL. The caller passes `*comm` to kolo_comm_destroy; it is NULL if this fails.
kolo_result_t kolo_comm_init_env(kolo_comm_t *comm, const struct kolo_config_t *config);

// As kolo_comm_init_env, for `nranks` ranks that share a unique id. One process made the id with
// kolo_get_unique_id, and the program passed it to all ranks. That process must live until all
// ranks have connected.
kolo_result_t kolo_comm_init_rank(kolo_comm_t *comm,
                                  int32_t nranks,
                                  struct kolo_unique_id_t id,
                                  int32_t rank,
                                  const struct kolo_config_t *config);

// As kolo_comm_init_env, for `nranks` ranks that find each other at a store: `file:///path`,
// `tcp://host:port` (which rank 0 serves), `redis://host:port` (if kolo was built with it) or
// `env://`.
kolo_result_t kolo_comm_init_store(kolo_comm_t *comm,
                                   int32_t nranks,
                                   const char *url,
                                   int32_t rank,
                                   const struct kolo_config_t *config);

// As kolo_comm_init_store, with a store that consists of the caller's functions. Only this thread
// calls them, and only until this returns: the store may be freed then. So the communicator does not
// grow: kolo_comm_grow returns KOLO_ERR_UNSUPPORTED.
kolo_result_t kolo_comm_init_callbacks(kolo_comm_t *comm,
                                       int32_t nranks,
                                       const struct kolo_store_t *store,
                                       int32_t rank,
                                       const struct kolo_config_t *config);

// Makes the `nranks` ranks of one group inside this process: `comms[i]` is rank i, for a thread of
// its own. For tests, and for programs with a thread for each rank. `comms` has room for `nranks`
// handles, at most 4096.
kolo_result_t kolo_comm_init_all(kolo_comm_t *comms, int32_t nranks, const struct kolo_config_t *config);

// Divides the ranks. All ranks with the same `color` (from 0) become members of one new
// communicator, in the order of their `key`s, and of their ranks where keys are equal. A rank with
// KOLO_NO_COLOR becomes a member of none: its `*newcomm` becomes NULL.
//
// A collective call of all ranks of `comm`. The new communicator is independent of `comm` and has
// the same settings.
kolo_result_t kolo_comm_split(kolo_comm_t comm, int32_t color, int32_t key, kolo_comm_t *newcomm);

// After a failure, makes a communicator of the surviving ranks: `*newcomm` has them in the order
// of `comm` and with the same settings. It is NULL if this fails. `comm` ends if it has not failed
// already; the caller still passes it to kolo_comm_destroy.
//
// Operations in flight on `comm` fail; kolo_work_wait tells when their buffers belong to the
// caller again. The last operation that succeeded may differ between ranks: the ranks must agree
// on where to continue. Memory of kolo_mem_alloc stays valid and usable. Reducers, and
// communicators split from `comm`, are independent of it. They fail if the failed rank is a
// member: make them anew with `*newcomm`.
//
// A collective call of all ranks that continue. It does not wait for ranks whose process has
// ended. A rank that is alive but does not call this has until the start deadline; the rank at
// fault has one second. KOLO_ERR_EXCLUDED if this rank called too late, and the others continued
// without it.
kolo_result_t kolo_comm_shrink(kolo_comm_t comm, kolo_comm_t *newcomm);

// Admits the processes that wait to join the job (`join` in kolo_config_t): `*newcomm` has the ranks
// of `comm` with their numbers and then the newcomers. It is NULL if no process waits, or if this
// fails. `comm` stays usable; the caller passes it to kolo_comm_destroy when it continues with
// `*newcomm`.
//
// A collective call. If no process waits, it costs a look into the store on rank 0 and a small
// broadcast, so a program can call it every few steps. Newcomers know nothing of the program's
// state: send it with kolo_broadcast. KOLO_ERR_NOT_GROWN on all ranks if the store or a newcomer
// fails: `comm` stays usable. KOLO_ERR_UNSUPPORTED if `comm` was split from another communicator, or
// comes from kolo_comm_init_callbacks or kolo_comm_init_all.
kolo_result_t kolo_comm_grow(kolo_comm_t comm, kolo_comm_t *newcomm);

// Cancels all operations in flight on this communicator, and ends it. Calls of other threads and
// nonblocking operations fail with KOLO_ERR_ABORTED, later ones with KOLO_ERR_REVOKED, and those
// of the other ranks fail, too. Any thread may call it, but no signal handler: it is not
// async-signal-safe. It returns at once. An operation in flight notices within half a second. The
// handle stays valid; the caller still passes it to kolo_comm_destroy.
kolo_result_t kolo_comm_abort(kolo_comm_t comm);

// Tells the other ranks that this rank has left, and frees the communicator: its handle is invalid
// afterwards. It cancels operations in flight as kolo_comm_abort does, so wait for them first.
// When this returns, no operation uses its buffers any more. Communicators split from it, and
// memory of kolo_mem_alloc, stay valid.
kolo_result_t kolo_comm_destroy(kolo_comm_t comm);

// Writes the last operations of this rank to a file, for `kolo trace`: up to 1024 of each
// communicator that comes from the same first one by splitting. Any thread may call it, also while
// operations are in flight.
kolo_result_t kolo_comm_dump_trace(kolo_comm_t comm, const char *path);

// Writes the number of ranks to `*count`.
kolo_result_t kolo_comm_count(kolo_comm_t comm, int32_t *count);

// Writes this rank to `*rank`: 0 to the number of ranks less one.
kolo_result_t kolo_comm_rank(kolo_comm_t comm, int32_t *rank);

// Writes the number of hosts of the ranks to `*count`.
kolo_result_t kolo_comm_host_count(kolo_comm_t comm, int32_t *count);

// Writes the transport to `*name`: "none" (one rank alone), "shm", "tcp" or "shm+tcp". The text is
// static.
kolo_result_t kolo_comm_transport(kolo_comm_t comm, const char **name);

// Sets `*has` to 1 if this rank's buffers may be in the memory of GPUs, otherwise to 0. They may
// if rank 0's `KOLO_DEVICES` permits it, every rank's kolo was built with the feature `cuda`, and the
// host has a driver.
kolo_result_t kolo_comm_has_devices(kolo_comm_t comm, int32_t *has);

// Sets `*result` to KOLO_OK if the communicator works, otherwise to the result of the operation
// that ended it. Does not wait.
kolo_result_t kolo_comm_get_async_error(kolo_comm_t comm, kolo_result_t *result);

// Fills in what the communicator has done so far. An operation counts when it has completed. Any
// thread may call this, also while operations are in flight.
kolo_result_t kolo_comm_stats(kolo_comm_t comm, struct kolo_comm_stats_t *stats);

// Reduces the `send` buffers of all ranks element by element, and writes the result to `recv` on
// all ranks. Each buffer has `count` elements. All ranks get the same bits. In place if `send ==
// recv`. Inside a host, peers read and write registered buffers in place: see kolo_mem_alloc.
kolo_result_t kolo_all_reduce(const void *send,
                              void *recv,
                              size_t count,
                              kolo_dtype_t dtype,
                              kolo_redop_t op,
                              kolo_comm_t comm,
                              kolo_stream_t stream);

// As kolo_all_reduce, but only the root gets the result. `recv` of other ranks is not used and may
// be NULL.
kolo_result_t kolo_reduce(const void *send,
                          void *recv,
                          size_t count,
                          kolo_dtype_t dtype,
                          kolo_redop_t op,
                          int32_t root,
                          kolo_comm_t comm,
                          kolo_stream_t stream);

// Copies `send` of the root to `recv` on all ranks. Each buffer has `count` elements. `send` of
// other ranks is not used and may be NULL. In place if `send == recv`.
kolo_result_t kolo_broadcast(const void *send,
                             void *recv,
                             size_t count,
                             kolo_dtype_t dtype,
                             int32_t root,
                             kolo_comm_t comm,
                             kolo_stream_t stream);

// Concatenates the `send` buffers of all ranks, of `count` elements each, in rank order, and
// writes the result to `recv` on all ranks. In place if `send` is this rank's block of `recv`:
// `recv + rank * count` elements.
kolo_result_t kolo_all_gather(const void *send,
                              void *recv,
                              size_t count,
                              kolo_dtype_t dtype,
                              kolo_comm_t comm,
                              kolo_stream_t stream);

// As kolo_all_gather, but rank i sends `counts[i]` elements. `counts` has an entry for each rank
// and is the same on all ranks. It is read before this returns.
kolo_result_t kolo_all_gather_v(const void *send,
                                void *recv,
                                const size_t *counts,
                                kolo_dtype_t dtype,
                                kolo_comm_t comm,
                                kolo_stream_t stream);

// Reduces the `send` buffers of all ranks element by element, and writes block i of the result to
// `recv` of rank i. `send` has a block of `count` elements for each rank. In place if `recv` is
// this rank's block of `send`: `send + rank * count` elements. The content of the other blocks is
// then undefined.
kolo_result_t kolo_reduce_scatter(const void *send,
                                  void *recv,
                                  size_t count,
                                  kolo_dtype_t dtype,
                                  kolo_redop_t op,
                                  kolo_comm_t comm,
                                  kolo_stream_t stream);

// As kolo_reduce_scatter, but block i has `counts[i]` elements. `counts` has an entry for each
// rank and is the same on all ranks. It is read before this returns.
kolo_result_t kolo_reduce_scatter_v(const void *send,
                                    void *recv,
                                    const size_t *counts,
                                    kolo_dtype_t dtype,
                                    kolo_redop_t op,
                                    kolo_comm_t comm,
                                    kolo_stream_t stream);

// Copies block j of `send` of rank i to block i of `recv` of rank j. Both buffers have a block of
// `count` elements for each rank. In place if `send == recv`.
kolo_result_t kolo_all_to_all(const void *send,
                              void *recv,
                              size_t count,
                              kolo_dtype_t dtype,
                              kolo_comm_t comm,
                              kolo_stream_t stream);

// As kolo_all_to_all, but block j of `send` has `send_counts[j]` elements and block j of `recv`
// has `recv_counts[j]`. A rank must send another rank as many elements as that rank expects. Both
// arrays have an entry for each rank and are read before this returns. Not in place.
kolo_result_t kolo_all_to_all_v(const void *send,
                                const size_t *send_counts,
                                void *recv,
                                const size_t *recv_counts,
                                kolo_dtype_t dtype,
                                kolo_comm_t comm,
                                kolo_stream_t stream);

// As kolo_all_gather, but only the root gets the result. `recv` of other ranks is not used and may
// be NULL.
kolo_result_t kolo_gather(const void *send,
                          void *recv,
                          size_t count,
                          kolo_dtype_t dtype,
                          int32_t root,
                          kolo_comm_t comm,
                          kolo_stream_t stream);

// Copies block i of the root's `send` to `recv` of rank i. `send` has a block of `count` elements
// for each rank; on other ranks it is not used and may be NULL. In place if `recv` is this rank's
// block of `send`.
kolo_result_t kolo_scatter(const void *send,
                           void *recv,
                           size_t count,
                           kolo_dtype_t dtype,
                           int32_t root,
                           kolo_comm_t comm,
                           kolo_stream_t stream);

// Returns when all ranks have called it.
kolo_result_t kolo_barrier(kolo_comm_t comm, kolo_stream_t stream);

// Sends `count` elements to a rank, which receives the same number of the same type with
// kolo_recv. It may wait until that rank has called kolo_recv: two ranks that both send first may
// wait for each other until the deadline. For such an exchange use a group, kolo_send_recv or
// kolo_start_send.
kolo_result_t kolo_send(const void *send,
                        size_t count,
                        kolo_dtype_t dtype,
                        int32_t peer,
                        kolo_comm_t comm,
                        kolo_stream_t stream);

// Receives `count` elements from a rank. Messages of one rank arrive in the order in which it sent
// them. Those with a tag are for kolo_recv_tagged.
kolo_result_t kolo_recv(void *recv,
                        size_t count,
                        kolo_dtype_t dtype,
                        int32_t peer,
                        kolo_comm_t comm,
                        kolo_stream_t stream);

// As kolo_send, with a tag: the rank receives the message with kolo_recv_tagged and the same tag.
// Tag 0 is that of messages without a tag. The rank may be this one. A rank that waits in a
// receive keeps the messages that come before its own, up to 64 MiB of each sender; so does a
// collective by TCP. Others wait here, so a blocking send may wait for the peer, as kolo_send does.
kolo_result_t kolo_send_tagged(const void *send,
                               size_t count,
                               kolo_dtype_t dtype,
                               int32_t peer,
                               uint32_t tag,
                               kolo_comm_t comm,
                               kolo_stream_t stream);

// Receives `count` elements that a rank sends with this tag, in any order. Messages of one rank and
// one tag arrive in the order in which it sent them. If none with this tag comes before the deadline,
// the error names the tags of those that wait.
kolo_result_t kolo_recv_tagged(void *recv,
                               size_t count,
                               kolo_dtype_t dtype,
                               int32_t peer,
                               uint32_t tag,
                               kolo_comm_t comm,
                               kolo_stream_t stream);

// Receives `count` elements from any rank: the first message without a tag that arrives and that no earlier
// receive waits for. Writes its sender to `*source`, unless `source` is NULL. Fails at once if a
// rank was killed, or ended on this host without kolo_comm_destroy. Not allowed in a group.
kolo_result_t kolo_recv_any(void *recv,
                            size_t count,
                            kolo_dtype_t dtype,
                            int32_t *source,
                            kolo_comm_t comm,
                            kolo_stream_t stream);

// As kolo_recv_any, for messages with a tag.
kolo_result_t kolo_recv_any_tagged(void *recv,
                                   size_t count,
                                   kolo_dtype_t dtype,
                                   int32_t *source,
                                   uint32_t tag,
                                   kolo_comm_t comm,
                                   kolo_stream_t stream);

// Sends to one rank and receives from another, or from the same rank, at the same time. In place if
// `send` and `recv` are the same and so are the counts: kolo then sends a copy. Buffers that overlap
// otherwise are refused, and so is host memory in place in a stream.
kolo_result_t kolo_send_recv(const void *send,
                             size_t send_count,
                             int32_t to,
                             void *recv,
                             size_t recv_count,
                             int32_t from,
                             kolo_dtype_t dtype,
                             kolo_comm_t comm,
                             kolo_stream_t stream);

// Waits until an operation has ended, and returns its result: KOLO_OK, or why it failed. Every
// operation has a deadline, so this returns. Afterwards the buffers belong to the caller again. It
// may be called several times, and by several threads. A thread that waits may run collectives that
// have been started and have not begun: that is faster than to wake the progress thread.
kolo_result_t kolo_work_wait(kolo_work_t work);

// As kolo_work_wait, but waits at most `timeout_ms` milliseconds. KOLO_IN_PROGRESS if the
// operation has not ended by then.
kolo_result_t kolo_work_wait_timeout(kolo_work_t work, uint64_t timeout_ms);

// Waits until one of `n` operations has ended, and writes its place in `works` to `*index`: the
// lowest, if several have ended. Waits at most `timeout_ms` milliseconds; KOLO_IN_PROGRESS if none
// has ended by then. KOLO_OK says that one has ended, and kolo_work_wait how.
//
// KOLO_ERR_ARGUMENT if `n` is 0 or a pointer is NULL, KOLO_ERR_HANDLE if one of the handles is no
// operation. Either leaves `*index` as it is, and the operations go on.
kolo_result_t kolo_work_wait_any(const kolo_work_t *works, size_t n, size_t *index, uint64_t timeout_ms);

// Calls `function(context, result)` once when an operation has ended, on a thread of its own; soon,
// if it has ended already. The buffers belong to the caller then. The function may call kolo, also
// to wait for other operations. The handle may be destroyed before the end. What `context` points
// to must live until the function has returned.
//
// Not called in a forked child, nor if the system cannot start a thread, which is in the log.
kolo_result_t kolo_work_on_done(kolo_work_t work, kolo_done_function_t function, void *context);

// Makes a CUDA stream wait until an operation has ended, and returns KOLO_OK at once. Later work
// of the stream finds the result. If the operation fails, the stream continues, too, with
// undefined content in the buffers; kolo_work_test and kolo_work_wait return the error. For an
// operation on host memory without a stream, and where streams cannot wait for the host, this is
// kolo_work_wait.
//
// An operation that a CUDA graph captures counts as ended at once. This call orders streams in the
// capture, which cannot end before a stream of the capture waits for the operation.
kolo_result_t kolo_work_wait_on(kolo_work_t work, kolo_stream_t stream);

// Sets `*done` to 1 if an operation has ended, otherwise to 0. Returns KOLO_OK, or why the
// operation or this call failed. Does not wait.
kolo_result_t kolo_work_test(kolo_work_t work, int32_t *done);

// Writes how many nanoseconds an operation took to `*nanoseconds`: from its beginning, after the
// operations that were started before it, to its end. This includes the time in which this rank
// waited for the other ranks. KOLO_IN_PROGRESS if the operation has not ended; 0 ns if it failed
// before it began. Returns KOLO_OK also for an operation that failed.
kolo_result_t kolo_work_duration(kolo_work_t work, uint64_t *nanoseconds);

// Cancels an operation, unless it has ended. The other ranks wait for it, so this ends the
// communicator, as kolo_comm_abort does. Returns at once; kolo_work_wait tells when the buffers
// belong to the caller again.
kolo_result_t kolo_work_cancel(kolo_work_t work);

// Frees the handle, which is invalid afterwards. An operation that has not ended continues and
// uses its buffers until it ends: wait for it first.
kolo_result_t kolo_work_destroy(kolo_work_t work);

// Starts kolo_all_reduce and returns at once. Operations of one communicator take effect in the
// order of their calls, blocking or not. The buffers belong to the operation until kolo_work_wait
// or kolo_work_test has reported its end. Until then they must stay valid, `recv` must not be read
// or written, and `send` must not be written. If this fails, `*work` is NULL and no operation was
// started.
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

// Starts kolo_send. Sends and receives in flight progress side by side.
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

// Starts kolo_send_tagged.
kolo_result_t kolo_start_send_tagged(const void *send,
                                     size_t count,
                                     kolo_dtype_t dtype,
                                     int32_t peer,
                                     uint32_t tag,
                                     kolo_comm_t comm,
                                     kolo_stream_t stream,
                                     kolo_work_t *work);

// Starts kolo_recv_tagged.
kolo_result_t kolo_start_recv_tagged(void *recv,
                                     size_t count,
                                     kolo_dtype_t dtype,
                                     int32_t peer,
                                     uint32_t tag,
                                     kolo_comm_t comm,
                                     kolo_stream_t stream,
                                     kolo_work_t *work);

// Starts kolo_recv_any. `*source` belongs to the operation, too, until it has ended.
kolo_result_t kolo_start_recv_any(void *recv,
                                  size_t count,
                                  kolo_dtype_t dtype,
                                  int32_t *source,
                                  kolo_comm_t comm,
                                  kolo_stream_t stream,
                                  kolo_work_t *work);

// Starts kolo_recv_any_tagged, as kolo_start_recv_any does.
kolo_result_t kolo_start_recv_any_tagged(void *recv,
                                         size_t count,
                                         kolo_dtype_t dtype,
                                         int32_t *source,
                                         uint32_t tag,
                                         kolo_comm_t comm,
                                         kolo_stream_t stream,
                                         kolo_work_t *work);

// Sets a function that kolo calls on this thread, about 20 times a second, while a call of this
// thread waits for other ranks. NULL: none. It is for languages whose signal handlers run between
// two calls, and for programs whose signal handler sets a flag.
//
// If the function returns another number than 0, the call ends within half a second:
//
// - A function that makes a communicator returns KOLO_ERR_ABORTED.
// - A blocking operation ends its communicator, as kolo_comm_abort does, and returns
//   KOLO_ERR_ABORTED, also if it waits for earlier operations of the communicator.
// - kolo_work_wait, kolo_work_wait_timeout, kolo_work_wait_any and kolo_work_wait_on return
//   KOLO_IN_PROGRESS, and the operation goes on. But a collective that kolo_work_wait runs on this
//   thread, because it had not begun, is a blocking operation.
//
// In a wait for operations that run elsewhere, the function may call everything. In other waits,
// kolo_comm_abort and kolo_comm_destroy are allowed, and others return KOLO_ERR_ARGUMENT: the
// communicator is in use. kolo_comm_destroy then ends the communicator at once, and frees it when
// the call has returned. The function must not throw C++ exceptions, nor leave by longjmp.
kolo_result_t kolo_set_wait_check(kolo_wait_check_t check, void *context);

// Begins a group. Until kolo_group_end, the blocking collectives, sends and receives of this
// thread are held back: they return at once, and use their buffers until kolo_group_end returns.
// Groups may be nested; the end of the outermost group executes all calls.
//
// If a call fails, the group drops all its calls: their buffers belong to the caller again, and
// later calls fail until kolo_group_end.
kolo_result_t kolo_group_start(void);

// Ends a group: executes the calls that were held back, and returns when all are done. Sends and
// receives progress side by side, so that none waits for an earlier one; so do the calls of
// different communicators. Collectives of one communicator take effect in order. No buffer in which
// one of the calls receives may overlap another call's, except a send of the same memory: see
// kolo_send_recv.
//
// If any call of this thread has failed since kolo_group_start, on any communicator, no call is
// executed, and this returns KOLO_ERR_ARGUMENT. If several calls fail when they are executed, this
// returns the first failure.
kolo_result_t kolo_group_end(void);

// Allocates a registered buffer: `bytes` of zeroed memory, aligned to a page, that the ranks of
// this host share. Collectives read and write such buffers in place, without a copy in between.
// Where ranks cannot share memory, it is ordinary memory with the same use.
//
// A collective call of all ranks of `comm`, with the same number of bytes. The caller passes
// `*ptr` to kolo_mem_free; it is NULL if this fails.
kolo_result_t kolo_mem_alloc(void **ptr, size_t bytes, kolo_comm_t comm);

// Takes a registered buffer from the pool of `comm`: as kolo_mem_alloc, but this rank takes it
// alone. It is not a collective call. The bytes are zeros or what earlier holders have left.
//
// Freed buffers stay in the pool for later ones. The pool ends with the communicator and its last
// buffer. The other ranks learn of new memory in a large collective of `comm`; until another one
// has followed, operations copy it as they copy ordinary memory.
//
// Without shared memory (ranks alone on their host, no room, too many buffers) it is ordinary
// memory with the same use. KOLO_ERR_ARGUMENT if there is none of that either, KOLO_ERR_HANDLE if
// `comm` is no communicator, KOLO_ERR_FORKED in a forked child.
//
// The caller passes `*ptr` to kolo_mem_free; it is NULL if this fails.
kolo_result_t kolo_mem_alloc_pooled(void **ptr, size_t bytes, kolo_comm_t comm);

// Frees memory of kolo_mem_alloc or kolo_mem_alloc_pooled; NULL has no effect. Not a collective
// call; the communicator may be destroyed before. Operations on the memory must have ended. In a
// forked child it does not change the memory, which belongs to the parent.
kolo_result_t kolo_mem_free(void *ptr);

// Makes a reducer of all ranks of `comm`, for the `nparameters` parameters of a model, in the
// order in which its forward pass uses them, and its `nbuffers` buffers. If ranks give different
// parameters or buffers, all ranks get KOLO_ERR_REDUCER with the first difference. `config` may be
// NULL.
//
// A collective call. The reducer has its own communicator and a thread; `comm` may be destroyed
// before it. The caller may free all arguments when this returns, except `config->stream` and what
// `config->hook_context` points to: every step uses them, until kolo_reducer_destroy has returned.
// The caller passes `*reducer` to kolo_reducer_destroy; it is NULL if this fails.
kolo_result_t kolo_reducer_create(kolo_reducer_t *reducer,
                                  const struct kolo_tensor_t *parameters,
                                  size_t nparameters,
                                  const struct kolo_tensor_t *buffers,
                                  size_t nbuffers,
                                  const struct kolo_reducer_config_t *config,
                                  kolo_comm_t comm);

// Frees a reducer and the memory of its gradients. It cancels a step in progress, which then fails
// on the other ranks.
kolo_result_t kolo_reducer_destroy(kolo_reducer_t reducer);

// Begins a step. At its end all ranks have the average of their gradients. The second call is
// collective: it rebuilds the buckets, and gradients move to other addresses.
kolo_result_t kolo_reducer_begin(kolo_reducer_t reducer);

// Begins a step that is not reduced. Its gradients are kept, and the gradients of the next steps
// are added to them. The next step that kolo_reducer_begin begins averages the sum. Not a
// collective call.
kolo_result_t kolo_reducer_accumulate(kolo_reducer_t reducer);

// Sets `*gradient` to the address of a parameter's gradient, in memory that the ranks of the host
// share. The address is valid until the second kolo_reducer_begin of any rank rebuilds the buckets
// (on a rank that has joined, kolo_reducer_join). An address from after that is valid as long as
// the reducer lives.
//
// For a parameter on the reducer's device it is an address there, for use in the order of
// `config->stream`. The average includes what the stream writes before kolo_reducer_ready. Work
// that the stream gets after kolo_reducer_finish has returned finds the average.
//
// The caller may write the gradient from the start of a step until kolo_reducer_ready, and read
// and write it from the end of the step until the next step begins. In between it belongs to the
// reducer. Unless `accumulates` is NULL, `*accumulates` becomes 1 if the caller must add the
// step's gradient to the elements in place, otherwise 0.
kolo_result_t kolo_reducer_gradient(kolo_reducer_t reducer, size_t parameter, void **gradient, int32_t *accumulates);

// Marks a gradient as ready that was written to its address. Any thread may call it. If this fills
// a bucket, its reduction starts when all earlier buckets have started.
kolo_result_t kolo_reducer_ready(kolo_reducer_t reducer, size_t parameter);

// Declares that this step gives a parameter no gradient. The gradient counts as zeros.
kolo_result_t kolo_reducer_unused(kolo_reducer_t reducer, size_t parameter);

// Copies a gradient to its address, or adds it if the step accumulates, and marks it as ready. Any
// thread may call it. `gradient` must not overlap that address: a gradient that is in place takes
// kolo_reducer_ready.
//
// For a parameter on the reducer's device, the copy is work of `config->stream`, and `gradient`
// must stay valid until the stream has executed it. The elements are contiguous: `strides` must be
// NULL.
//
// `strides` has an entry for each dimension, in elements: the element of index `[i, j, ...]` is
// `gradient[i * strides[0] + j * strides[1] + ...]`. NULL: the elements are contiguous and
// row-major.
kolo_result_t kolo_reducer_put(kolo_reducer_t reducer, size_t parameter, const void *gradient, const size_t *strides);

// Ends the step: starts the remaining buckets, and waits until all are reduced. A step of
// kolo_reducer_accumulate is not reduced. If a gradient is missing that must not be,
// KOLO_ERR_REDUCER names the first one, and the step fails on the other ranks, too.
kolo_result_t kolo_reducer_finish(kolo_reducer_t reducer);

// Takes part in one step of the ranks that have input, with zeros. It is for ranks that have no
// more input; `config->uneven` must allow that. `*more` is 1 after such a step: the caller may
// read gradients, and calls this again. `*more` is 0 when no rank has input any more.
kolo_result_t kolo_reducer_join(kolo_reducer_t reducer, int32_t *more);

// Sets `*rank` to the rank that made the last step, the lowest of several. When no rank has input
// any more, that rank has the latest buffers; kolo_reducer_sync_buffers copies them to all ranks.
kolo_result_t kolo_reducer_last(kolo_reducer_t reducer, int32_t *rank);

// Copies rank 0's values of all parameters to all ranks. `values` has an address for each
// parameter, in their order. It overwrites the gradients. A collective call.
kolo_result_t kolo_reducer_broadcast_parameters(kolo_reducer_t reducer, void *const *values);

// As kolo_reducer_broadcast_parameters, but all ranks get the average of their values.
kolo_result_t kolo_reducer_average_parameters(kolo_reducer_t reducer, void *const *values);

// Copies the buffers of rank `from` to all ranks, or their average if `from` is KOLO_SYNC_AVERAGE.
// `values` has an address for each buffer, in their order. A collective call.
kolo_result_t kolo_reducer_sync_buffers(kolo_reducer_t reducer, void *const *values, int32_t from);

// Sets `*used` to 1 if a parameter got a gradient in the last step on any rank (with
// KOLO_UNUSED_ERROR, on this rank), otherwise to 0. KOLO_ERR_REDUCER if there is no such
// parameter.
kolo_result_t kolo_reducer_is_used(kolo_reducer_t reducer, size_t parameter, int32_t *used);

// Fills in the costs of the last step that was reduced.
kolo_result_t kolo_reducer_stats(kolo_reducer_t reducer, struct kolo_step_stats_t *stats);

// Fills in the costs of one bucket of the last step that was reduced. `bucket` is its index in the
// order in which buckets were started, less than `buckets` of kolo_reducer_stats.
kolo_result_t kolo_reducer_bucket_stats(kolo_reducer_t reducer, size_t bucket, struct kolo_bucket_stats_t *stats);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

// Each function that makes a communicator is also a macro, which checks the version first: it is
// KOLO_ERR_VERSION if this header and the loaded library have different ABIs.
#define KOLO_CHECKED(call) (kolo_check_version(KOLO_VERSION) == KOLO_OK ? (call) : KOLO_ERR_VERSION)
#define kolo_comm_init_env(...) KOLO_CHECKED(kolo_comm_init_env(__VA_ARGS__))
#define kolo_comm_init_rank(...) KOLO_CHECKED(kolo_comm_init_rank(__VA_ARGS__))
#define kolo_comm_init_store(...) KOLO_CHECKED(kolo_comm_init_store(__VA_ARGS__))
#define kolo_comm_init_callbacks(...) KOLO_CHECKED(kolo_comm_init_callbacks(__VA_ARGS__))
#define kolo_comm_init_all(...) KOLO_CHECKED(kolo_comm_init_all(__VA_ARGS__))

#endif  /* KOLO_H */
