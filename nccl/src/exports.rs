//! The functions of NCCL 2.32, one row each, and their twins for profilers, `pnccl*`.

use std::ffi::{c_char, c_int, c_uint, c_void};

use kolo::Op;

use crate::boundary::{boundary, infallible};
use crate::calls::{self, Arguments};
use crate::codes::{SUCCESS, VERSION, ncclResult_t, words};
use crate::comm::{enter, ncclComm_t};
use crate::device_api as device;
use crate::held;
use crate::pointers::place;
use crate::structs::*;
use crate::{last, manage, memory, parameters};

type Stream = *mut c_void;
type In = *const c_void;
type Out = *mut c_void;
type Config = *const ncclConfig_t;
type CallConfig = *const ncclCollConfig_t;
type Window = *mut c_void;
type Param = parameters::Handle;

/// Defines each function twice. A row gives its arguments, and what it calls; a row with `->` returns
/// something else than a result, and what it returns after a fault comes first.
macro_rules! exports {
    (@one $(#[$meta:meta])* $name:ident($($argument:ident: $type:ty),*) => $call:expr) => {
        $(#[$meta])*
        #[allow(unused_unsafe, reason = "some calls are safe")]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> ncclResult_t {
            // SAFETY: the caller's pointers are null or valid, as nccl.h says.
            boundary(stringify!($name), || unsafe { $call })
        }
    };
    (@one $(#[$meta:meta])* $name:ident($($argument:ident: $type:ty),*) -> $returned:ty, $otherwise:expr => $call:expr) => {
        $(#[$meta])*
        pub unsafe extern "C" fn $name($($argument: $type),*) -> $returned {
            infallible(stringify!($name), $otherwise, || $call)
        }
    };
    ($(fn $name:ident($($argument:ident: $type:ty),* $(,)?) $(-> $returned:ty, $otherwise:expr)? => $call:expr;)*) => {
        $(exports! { @one #[unsafe(no_mangle)] $name($($argument: $type),*) $(-> $returned, $otherwise)? => $call })*

        // The twins, to which a profiler's functions of the first names pass on. They are in a block of
        // their own, because they have the same names in Rust.
        const _: () = {
            $(exports! { @one #[unsafe(export_name = concat!("p", stringify!($name)))] $name($($argument: $type),*) $(-> $returned, $otherwise)? => $call })*
        };
    };
}

exports! {
    fn ncclGetVersion(version: *mut c_int) => { place(version, "version")?.write(VERSION); Ok(SUCCESS) };
    fn ncclGetErrorString(result: ncclResult_t) -> *const c_char, c"".as_ptr() => Ok(words(result).as_ptr());
    fn ncclGetLastError(comm: ncclComm_t) -> *const c_char, c"".as_ptr() => Ok(last_error(comm));
    fn ncclResetDebugInit() -> (), () => Ok(());

    fn ncclGetUniqueId(id: *mut ncclUniqueId) => manage::unique_id(id);
    fn ncclCommInitRank(comm: *mut ncclComm_t, nranks: c_int, id: ncclUniqueId, rank: c_int)
        => held::counted(manage::init_rank(comm, nranks, id, rank, std::ptr::null()));
    fn ncclCommInitRankConfig(comm: *mut ncclComm_t, nranks: c_int, id: ncclUniqueId, rank: c_int, config: Config)
        => held::counted(manage::init_rank(comm, nranks, id, rank, config));
    fn ncclCommInitRankScalable(comm: *mut ncclComm_t, nranks: c_int, rank: c_int, n: c_int, ids: *const ncclUniqueId, config: Config)
        => held::counted(manage::init_scalable(comm, nranks, rank, n, ids, config));
    fn ncclCommInitAll(comms: *mut ncclComm_t, ndev: c_int, devices: *const c_int) => manage::init_all(comms, ndev, devices);
    fn ncclCommFinalize(comm: ncclComm_t) => held::counted(manage::finalize(comm));
    fn ncclCommDestroy(comm: ncclComm_t) => manage::destroy(comm);
    fn ncclCommAbort(comm: ncclComm_t) => manage::abort(comm);
    fn ncclCommRevoke(comm: ncclComm_t, flags: c_int) => manage::revoke(comm, flags);
    fn ncclCommSplit(comm: ncclComm_t, color: c_int, key: c_int, newcomm: *mut ncclComm_t, config: Config)
        => held::counted(manage::split(comm, color, key, newcomm, config));
    fn ncclCommShrink(comm: ncclComm_t, excluded: *const c_int, count: c_int, newcomm: *mut ncclComm_t, config: Config, flags: c_int)
        => held::counted(manage::shrink(comm, excluded, count, newcomm, config, flags));
    fn ncclCommGetUniqueId(comm: ncclComm_t, id: *mut ncclUniqueId) => manage::unique_id_to_grow(comm, id);
    fn ncclCommGrow(comm: ncclComm_t, nranks: c_int, id: *const ncclUniqueId, rank: c_int, newcomm: *mut ncclComm_t, config: Config)
        => held::counted(manage::grow(comm, nranks, id, rank, newcomm, config));

    fn ncclCommGetAsyncError(comm: ncclComm_t, to: *mut ncclResult_t) => manage::async_error(comm, to);
    fn ncclCommCount(comm: ncclComm_t, to: *mut c_int) => manage::tell(comm, to, "count", |comm| comm.world_size());
    fn ncclCommUserRank(comm: ncclComm_t, to: *mut c_int) => manage::tell(comm, to, "rank", |comm| comm.rank());
    fn ncclCommCuDevice(comm: ncclComm_t, to: *mut c_int) => manage::device(comm, to);
    fn ncclCommSuspend(comm: ncclComm_t, _flags: c_int) => memory::no_suspension(comm);
    fn ncclCommResume(comm: ncclComm_t) => memory::no_suspension(comm);
    fn ncclCommMemStats(comm: ncclComm_t, stat: c_int, _value: *mut u64) => memory::no_statistics(comm, stat);
    fn ncclCommQueryProperties(comm: ncclComm_t, to: *mut ncclCommProperties_t) => device::properties(comm, to);

    fn ncclMemAlloc(to: *mut *mut c_void, size: usize) => memory::allocate(to, size);
    fn ncclMemFree(memory: *mut c_void) => memory::free(memory);
    fn ncclCommRegister(comm: ncclComm_t, buffer: Out, size: usize, to: *mut *mut c_void)
        => memory::register(comm, buffer, size, to, false);
    fn ncclCommDeregister(comm: ncclComm_t, handle: *mut c_void) => memory::deregister(comm, handle, false);
    fn ncclCommWindowRegister(comm: ncclComm_t, buffer: Out, size: usize, to: *mut Window, _flags: c_int)
        => memory::register(comm, buffer, size, to, true);
    fn ncclCommWindowDeregister(comm: ncclComm_t, window: Window) => memory::deregister(comm, window, true);
    fn ncclWinGetUserPtr(comm: ncclComm_t, window: Window, to: *mut *mut c_void) => memory::window_address(comm, window, to);

    fn ncclRedOpCreatePreMulSum(op: *mut c_int, scalar: Out, dtype: c_int, residence: c_int, comm: ncclComm_t)
        => calls::create_operator(op, scalar, dtype, residence, comm);
    fn ncclRedOpDestroy(op: c_int, comm: ncclComm_t) => calls::destroy_operator(op, comm);

    fn ncclAllReduce(send: In, recv: Out, count: usize, dtype: c_int, op: c_int, comm: ncclComm_t, stream: Stream)
        => Arguments::of(Op::AllReduce, send, recv, count, dtype).reduced(op).run(comm, stream);
    fn ncclAllReduceConfig(send: In, recv: Out, count: usize, dtype: c_int, op: c_int, comm: ncclComm_t, stream: Stream, config: CallConfig)
        => Arguments::of(Op::AllReduce, send, recv, count, dtype).reduced(op).config(config).run(comm, stream);
    fn ncclReduce(send: In, recv: Out, count: usize, dtype: c_int, op: c_int, root: c_int, comm: ncclComm_t, stream: Stream)
        => Arguments::of(Op::Reduce, send, recv, count, dtype).reduced(op).root(root).run(comm, stream);
    fn ncclReduceConfig(send: In, recv: Out, count: usize, dtype: c_int, op: c_int, root: c_int, comm: ncclComm_t, stream: Stream, config: CallConfig)
        => Arguments::of(Op::Reduce, send, recv, count, dtype).reduced(op).root(root).config(config).run(comm, stream);
    fn ncclBcast(buffer: Out, count: usize, dtype: c_int, root: c_int, comm: ncclComm_t, stream: Stream)
        => Arguments::of(Op::Broadcast, buffer, buffer, count, dtype).root(root).run(comm, stream);
    fn ncclBroadcast(send: In, recv: Out, count: usize, dtype: c_int, root: c_int, comm: ncclComm_t, stream: Stream)
        => Arguments::of(Op::Broadcast, send, recv, count, dtype).root(root).run(comm, stream);
    fn ncclBroadcastConfig(send: In, recv: Out, count: usize, dtype: c_int, root: c_int, comm: ncclComm_t, stream: Stream, config: CallConfig)
        => Arguments::of(Op::Broadcast, send, recv, count, dtype).root(root).config(config).run(comm, stream);
    fn ncclReduceScatter(send: In, recv: Out, count: usize, dtype: c_int, op: c_int, comm: ncclComm_t, stream: Stream)
        => Arguments::of(Op::ReduceScatter, send, recv, count, dtype).reduced(op).run(comm, stream);
    fn ncclReduceScatterConfig(send: In, recv: Out, count: usize, dtype: c_int, op: c_int, comm: ncclComm_t, stream: Stream, config: CallConfig)
        => Arguments::of(Op::ReduceScatter, send, recv, count, dtype).reduced(op).config(config).run(comm, stream);
    fn ncclAllGather(send: In, recv: Out, count: usize, dtype: c_int, comm: ncclComm_t, stream: Stream)
        => Arguments::of(Op::AllGather, send, recv, count, dtype).run(comm, stream);
    fn ncclAllGatherConfig(send: In, recv: Out, count: usize, dtype: c_int, comm: ncclComm_t, stream: Stream, config: CallConfig)
        => Arguments::of(Op::AllGather, send, recv, count, dtype).config(config).run(comm, stream);
    fn ncclAlltoAll(send: In, recv: Out, count: usize, dtype: c_int, comm: ncclComm_t, stream: Stream)
        => Arguments::of(Op::AllToAll, send, recv, count, dtype).run(comm, stream);
    fn ncclAlltoAllConfig(send: In, recv: Out, count: usize, dtype: c_int, comm: ncclComm_t, stream: Stream, config: CallConfig)
        => Arguments::of(Op::AllToAll, send, recv, count, dtype).config(config).run(comm, stream);
    fn ncclGather(send: In, recv: Out, count: usize, dtype: c_int, root: c_int, comm: ncclComm_t, stream: Stream)
        => Arguments::of(Op::Gather, send, recv, count, dtype).root(root).run(comm, stream);
    fn ncclGatherConfig(send: In, recv: Out, count: usize, dtype: c_int, root: c_int, comm: ncclComm_t, stream: Stream, config: CallConfig)
        => Arguments::of(Op::Gather, send, recv, count, dtype).root(root).config(config).run(comm, stream);
    fn ncclScatter(send: In, recv: Out, count: usize, dtype: c_int, root: c_int, comm: ncclComm_t, stream: Stream)
        => Arguments::of(Op::Scatter, send, recv, count, dtype).root(root).run(comm, stream);
    fn ncclScatterConfig(send: In, recv: Out, count: usize, dtype: c_int, root: c_int, comm: ncclComm_t, stream: Stream, config: CallConfig)
        => Arguments::of(Op::Scatter, send, recv, count, dtype).root(root).config(config).run(comm, stream);
    fn ncclSend(send: In, count: usize, dtype: c_int, peer: c_int, comm: ncclComm_t, stream: Stream)
        => Arguments::of(Op::Send, send, std::ptr::null_mut(), count, dtype).peer(peer).run(comm, stream);
    fn ncclRecv(recv: Out, count: usize, dtype: c_int, peer: c_int, comm: ncclComm_t, stream: Stream)
        => Arguments::of(Op::Recv, std::ptr::null(), recv, count, dtype).peer(peer).run(comm, stream);

    fn ncclGroupStart() => calls::group_start();
    fn ncclGroupEnd() => calls::group_end();
    fn ncclGroupSimulateEnd(info: *mut ncclSimInfo_t) => calls::group_simulate_end(info);

    fn ncclPutSignal(_send: In, _count: usize, _dtype: c_int, _peer: c_int, _window: Window, _offset: usize, _signal: c_int, _context: c_int, _flags: c_uint, comm: ncclComm_t, _stream: Stream)
        => device::refuse_one_sided(comm, "ncclPutSignal");
    fn ncclSignal(_peer: c_int, _signal: c_int, _context: c_int, _flags: c_uint, comm: ncclComm_t, _stream: Stream)
        => device::refuse_one_sided(comm, "ncclSignal");
    fn ncclWaitSignal(_count: c_int, _signals: *mut ncclWaitSignalDesc_t, comm: ncclComm_t, _stream: Stream)
        => device::refuse_one_sided(comm, "ncclWaitSignal");

    fn ncclSetEncryption(config: *const ncclEncryptionConfig_t) => device::set_encryption(config);

    fn ncclParamBind(to: *mut Param, key: *const c_char) => parameters::bind(to, key);
    fn ncclParamGetI8(param: Param, to: *mut i8) => parameters::number(param, to);
    fn ncclParamGetI16(param: Param, to: *mut i16) => parameters::number(param, to);
    fn ncclParamGetI32(param: Param, to: *mut i32) => parameters::number(param, to);
    fn ncclParamGetI64(param: Param, to: *mut i64) => parameters::number(param, to);
    fn ncclParamGetU8(param: Param, to: *mut u8) => parameters::number(param, to);
    fn ncclParamGetU16(param: Param, to: *mut u16) => parameters::number(param, to);
    fn ncclParamGetU32(param: Param, to: *mut u32) => parameters::number(param, to);
    fn ncclParamGetU64(param: Param, to: *mut u64) => parameters::number(param, to);
    fn ncclParamGetStr(param: Param, to: *mut *const c_char) => parameters::string(param, to);
    fn ncclParamGet(param: Param, to: Out, most: c_int, len: *mut c_int) => parameters::bytes(param, to, most, len);
    fn ncclParamGetParameter(key: *const c_char, to: *mut *const c_char, len: *mut c_int) => parameters::by_key(key, to, len);
    fn ncclParamGetAllParameterKeys(table: *mut *const *const c_char, len: *mut c_int) => parameters::keys(table, len);
    fn ncclParamDumpAll() -> (), () => { parameters::dump(); Ok(()) };

    fn ncclTeamWorld(comm: ncclComm_t) -> ncclTeam_t, device::NO_TEAM => device::world(comm);
    fn ncclTeamLsa(comm: ncclComm_t) -> ncclTeam_t, device::NO_TEAM => device::alone(comm);
    fn ncclTeamCft(comm: ncclComm_t, _mode: c_int) -> ncclTeam_t, device::NO_TEAM => device::alone(comm);
    fn ncclTeamCftMultimem(comm: ncclComm_t) -> ncclTeam_t, device::NO_TEAM => device::alone(comm);
    fn ncclTeamRail(comm: ncclComm_t) -> ncclTeam_t, device::NO_TEAM => device::world(comm);
    fn ncclTeamRankToWorld(comm: ncclComm_t, team: ncclTeam_t, rank: c_int) -> c_int, -1 => device::to_world(comm, team, rank);
    fn ncclTeamRankToLsa(comm: ncclComm_t, team: ncclTeam_t, rank: c_int) -> c_int, -1 => device::to_alone(comm, team, rank);
    fn ncclLLA2ACalcSlots(elements: c_int, size: c_int) -> c_int, 0 => Ok(elements.saturating_mul(size.saturating_add(7) / 8));

    fn ncclDevCommCreate(_comm: ncclComm_t, _requirements: In, _to: Out) => device::refuse("ncclDevCommCreate");
    fn ncclDevCommDestroy(_comm: ncclComm_t, _dev_comm: In) => device::refuse("ncclDevCommDestroy");
    fn ncclGetLsaMultimemDevicePointer(_window: Window, _offset: usize, _to: *mut Out) => device::refuse("ncclGetLsaMultimemDevicePointer");
    fn ncclGetMultimemDevicePointer(_window: Window, _offset: usize, _multimem: Out, _to: *mut Out) => device::refuse("ncclGetMultimemDevicePointer");
    fn ncclGetLsaDevicePointer(_window: Window, _offset: usize, _rank: c_int, _to: *mut Out) => device::refuse("ncclGetLsaDevicePointer");
    fn ncclGetPeerDevicePointer(_window: Window, _offset: usize, _peer: c_int, _to: *mut Out) => device::refuse("ncclGetPeerDevicePointer");
    fn ncclGetMultimemDeviceLeInfo(_window: Window, _offset: usize, _id: Out, _to: *mut usize) => device::refuse("ncclGetMultimemDeviceLeInfo");
    fn ncclGetCftDeviceLeInfo(_window: Window, _offset: usize, _peer: c_int, _team: ncclTeam_t, _id: Out, _to: *mut usize) => device::refuse("ncclGetCftDeviceLeInfo");
    fn ncclGetPeerDeviceLeInfo(_window: Window, _offset: usize, _peer: c_int, _id: Out, _to: *mut usize) => device::refuse("ncclGetPeerDeviceLeInfo");
    fn ncclLsaBarrierCreateRequirement(_team: ncclTeam_t, _count: c_int, _handle: Out, _to: Out) => device::refuse("ncclLsaBarrierCreateRequirement");
    fn ncclGinBarrierCreateRequirement(_comm: ncclComm_t, _team: ncclTeam_t, _count: c_int, _handle: Out, _to: Out) => device::refuse("ncclGinBarrierCreateRequirement");
    fn ncclLLA2ACreateRequirement(_blocks: c_int, _slots: c_int, _handle: Out, _to: Out) => device::refuse("ncclLLA2ACreateRequirement");
    fn ncclGinOutboxCreateRequirement(_blocks: c_int, _log: c_int, _handle: Out, _to: Out) => device::refuse("ncclGinOutboxCreateRequirement");
    fn ncclGinInboxA2ACreateRequirement(_peers: ncclTeam_t, _blocks: c_int, _log: c_int, _handle: Out, _to: Out) => device::refuse("ncclGinInboxA2ACreateRequirement");
}

/// NVIDIA's library exports it without a twin.
#[unsafe(no_mangle)]
pub extern "C" fn ncclResetDebugInitInternal() {}

/// Returns the last error of a communicator, otherwise that of the process.
fn last_error(comm: ncclComm_t) -> *const c_char {
    let own = if comm.is_null() { String::new() } else { enter(comm).map(|comm| comm.last()).unwrap_or_default() };
    last::tell(if own.is_empty() { last::latest() } else { own })
}
