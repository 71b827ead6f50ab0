//! The table of settings: for each, its option in code, its kind, its default and its variables. All
//! else follows: the fields of [`Settings`](super::Settings), how the environment is read, the methods of
//! `Builder`, what rank 0 tells the others, and the tests of values.
//!
//! A row is the documentation and the arguments of the method of `Builder`, then `as` the
//! [`Kind`](super::kinds::Kind) of the setting, `=` its default and its variables:
//!
//! ```text
//! /// Sets how ranks exchange data. Rank 0's value applies to all ranks.
//! transport(transport: Transport) as Transport = Transport::Auto, "KOLO_TRANSPORT";
//! ```
//!
//! This row is the field `transport: Transport` of `SharedSettings` and the method
//!
//! ```text
//! pub fn transport(mut self, transport: Transport) -> Self
//! ```
//!
//! of `Builder`. Each macro here passes its rows to the macro that it is given.

/// The settings that all ranks take from rank 0, in their order on the wire.
macro_rules! shared_settings {
    ($then:ident! { $($with:tt)* }) => { $then! { $($with)*
        /// Sets the algorithm for all operations that have it. Rank 0's value applies to all ranks.
        algorithm(algorithm: Algorithm) as Option<Algorithm> = None, "KOLO_ALGORITHM";

        /// Sets how ranks exchange data. Rank 0's value applies to all ranks.
        transport(transport: Transport) as Transport = Transport::Auto, "KOLO_TRANSPORT";

        /// Sets how 32 KiB and more of private memory gets from one process of a host to another. Rank
        /// 0's value applies to all ranks.
        copy_mode(copy_mode: CopyMode) as CopyMode = CopyMode::Auto, "KOLO_COPY_MODE";

        /// Sets whether reductions have the same bits with every transport, layout and size: they then
        /// reduce in the order of ranks. Rank 0's value applies to all ranks.
        reproducible(reproducible: bool) as bool = false, "KOLO_REPRODUCIBLE";

        /// Sets the number of TCP connections that share the work of one link, 1 to 64. By default it is
        /// 1, and 4 where the round trip is long and the congestion control is not BBR. Rank 0's
        /// value applies to all ranks.
        sockets(sockets: usize) as Option<Sockets> = None, "KOLO_SOCKETS";

        /// Sets whether buffers may be in the memory of GPUs. Rank 0's value applies to all ranks. By
        /// default they may if rank 0's machine has a driver. They may not if a rank's kolo was built
        /// without the feature `cuda`. If they may, each call finds out in which memory its buffers
        /// are, and ranks tell each other before an operation of more than 64 KiB, which takes one or
        /// two microseconds inside a host.
        devices(devices: bool) as Devices = false, "KOLO_DEVICES";

        /// Sets how data in the memory of GPUs gets from one rank to another. Rank 0's value applies to
        /// all ranks.
        device_path(path: DevicePath) as DevicePath = DevicePath::Auto, "KOLO_DEVICE_PATH";

        /// Sets where ranks that each have a GPU of their own wait for each other. Rank 0's value applies to
        /// all ranks.
        device_waits(waits: DeviceWaits) as DeviceWaits = DeviceWaits::Kernels, "KOLO_DEVICE_WAITS";

        /// Sets how ranks of a host learn that all have reached a phase. Rank 0's value applies to all
        /// ranks.
        flag_layout(flag_layout: FlagLayout) as FlagLayout = FlagLayout::Auto, "KOLO_FLAG_LAYOUT";

        /// Sets how elements of messages between hosts are written, in all-reduces, reduces and
        /// reduce-scatters that sum or average 16 KiB or more: those of `f32` in 16 bits, or those of
        /// `f32`, `f16` and `bf16` in 8. Each host's part is rounded once, all parts are accumulated in
        /// `f32`, and the result is rounded once; every rank has the same bits. Other operations, and
        /// memory that the ranks of a host share, are exact; so is everything in reproducible mode.
        /// Rank 0's value applies to all ranks.
        wire_dtype(dtype: WireDType) as WireDType = WireDType::F32, "KOLO_WIRE_DTYPE";

        /// Sets the seed with which messages of 8 bits are rounded at random, to either of the two
        /// neighbours of an element, so that the error is 0 on average. Each call rounds otherwise. By
        /// default, 0, elements are rounded to the nearest. Rank 0's value applies to all ranks.
        wire_seed(seed: u32) as Seed = 0, "KOLO_WIRE_SEED";

        /// Sets the costs with which algorithms are compared, each finite and at least 0, so that those
        /// between hosts are not measured. Rank 0's value applies to all ranks.
        cost_model(model: CostModel) as Costs = Costs { model: CostModel::default(), are_measured: false }, "KOLO_NETWORK_LATENCY", "KOLO_NETWORK_BANDWIDTH";
    } };
}
pub(crate) use shared_settings;

/// The settings of which each rank has its own value.
macro_rules! own_settings {
    ($then:ident! { $($with:tt)* }) => { $then! { $($with)*
        /// Sets the deadline of each operation, more than 0.
        timeout(timeout: Duration) as Duration = Duration::from_secs(300), "KOLO_TIMEOUT";

        /// Sets how long ranks wait for each other when they connect, more than 0.
        start_timeout(timeout: Duration) as Duration = START_TIMEOUT, "KOLO_START_TIMEOUT";

        /// Sets the name of this rank's host. Ranks with different host names do not share memory.
        host(host: impl Into<String>) as Option<String> = None, "KOLO_HOST";

        /// Sets where this rank's host is in the network: a path such as `rack7` or `pod1/rack7`. If all
        /// ranks have one, fewer bytes cross the uplinks of racks. The path of a host is that of its lowest
        /// rank.
        topology(path: impl Into<String>) as Option<Topology> = None, "KOLO_TOPOLOGY";

        /// Sets whether a `tcp://` store accepts other machines although the ranks have no secret. Then
        /// every process that reaches it can join the job, or disturb it.
        insecure(insecure: bool) as bool = false, "KOLO_INSECURE";

        /// Sets which network interfaces or addresses may be used, in the syntax of `KOLO_INTERFACE`.
        interface(filter: impl Into<String>) as Option<Interface> = None, "KOLO_INTERFACE";

        /// Sets the network interfaces over which the links to other hosts are striped, in the syntax of
        /// `KOLO_RAILS`, which is that of [`Builder::interface`]: `"eth0,eth1"`.
        rails(filter: impl Into<String>) as Option<String> = None, "KOLO_RAILS";

        /// Sets the ports at which this process listens, for firewalls: to the other ranks, and with the
        /// store if rank 0 picks its port. All ranks have the same range. It needs one port for every rank of
        /// a host and one more for the store, or two for every rank if the job grows.
        ports(ports: RangeInclusive<u16>) as Option<RangeInclusive<u16>> = None, "KOLO_PORTS";

        /// Sets the congestion control of this rank's TCP connections, for what it sends: `auto`,
        /// `system`, or a name that the system knows, such as `cubic`. By default it is BBR where the
        /// round trip takes 2 ms or more and the system has it, Reno inside a machine, and otherwise the
        /// system's.
        congestion_control(name: impl Into<String>) as CongestionControl = CongestionControl::Auto, "KOLO_CONGESTION_CONTROL";

        /// Sets a folder where a rank writes the last operations of its communicators when one of them
        /// fails, as a file for `kolo trace`. The folder is created if it does not exist.
        trace_dir(folder: impl Into<PathBuf>) as Option<PathBuf> = None, "KOLO_TRACE_DIR";

        /// Sets whether these files are also written when this process receives SIGUSR1. Only then does
        /// kolo handle the signal, and calls the earlier handler as well. By default the signal ends a
        /// process that does not handle it.
        trace_signal(on: bool) as bool = false, "KOLO_TRACE_SIGNAL";

        /// Sets a folder where the lowest rank of each machine writes a file by which `kolo top` finds
        /// and enters the job. Only its user can open the file, which holds the secret of the job. The
        /// rank removes the file when it drops its last communicator. `kolo run` sets such a folder.
        top_dir(folder: impl Into<PathBuf>) as Option<PathBuf> = None, "KOLO_TOP_DIR";

        /// Sets where this rank serves metrics as Prometheus text, over HTTP: an address and a port as
        /// in `127.0.0.1:9400`, or a Unix socket as in `unix:/run/kolo-{rank}.sock`. The first rank of a
        /// machine listens at the port, and each other one at a port that is higher by 1. Every process
        /// that reaches the address can read the metrics.
        ///
        /// A rank of a world of one serves none. If the address cannot be used, connecting fails.
        metrics(address: impl Into<String>) as Option<MetricsAddress> = None, "KOLO_METRICS";

        /// Encrypts links between hosts by TLS 1.3. The PEM files hold the certificate of the job's
        /// authority, a certificate that it has signed for the name `kolo`, and the private key of the
        /// latter. Either all ranks have certificates, or none. Peer info and failure reports do not
        /// use the links: they are authenticated, but not encrypted.
        ///
        /// A link starts when both ranks use it, so a send does not return before its receiver has
        /// called. Without the feature `tls`, connecting fails.
        tls(authority: impl Into<PathBuf>, certificate: impl Into<PathBuf>, key: impl Into<PathBuf>) as Option<TlsFiles> = None, "KOLO_TLS_CA", "KOLO_TLS_CERT", "KOLO_TLS_KEY";

        /// Sets whether this process joins a job that has started, as a further rank. Its ranks admit it
        /// when they call [`Communicator::grow`]; it has no rank and no world size before. It needs the
        /// store, the name and the secret of the job.
        ///
        /// ```no_run
        /// # fn main() -> kolo::Result<()> {
        /// let comm = kolo::Communicator::builder().store("file:///shared/job").job("job").join(true).connect()?;
        /// let mut weights = vec![0.0f32; 1000];
        /// comm.broadcast(&mut weights, 0)?; // The ranks that were there call this, too.
        /// # Ok(())
        /// # }
        /// ```
        join(join: bool) as bool = false, "KOLO_JOIN";
    } };
}
pub(crate) use own_settings;
