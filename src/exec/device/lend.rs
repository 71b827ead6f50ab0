//! Calls whose buffers are a device's take their turn in a stream.

use super::*;

/// What a call needs whose buffers are on a device, or that takes its turn in a stream.
pub(crate) struct Lent {
    pub(super) device: Arc<dyn Device>,
    /// Whether the send and the receive buffer are the device's.
    pub(super) on_device: [bool; 2],
    /// Where the call takes its turn.
    pub(super) stream: StreamId,
    /// Done when that has come to the call.
    pub(super) ready: Event,
    /// Where streams can wait for its end.
    pub(super) gate: Option<Gate>,
    /// Whether the caller's stream does.
    pub(super) is_closed: AtomicBool,
    /// Whether the device can reduce.
    pub(super) has_kernels: bool,
}

impl Lent {
    /// Has the caller's stream wait for the end, if it can: the caller need not, then.
    pub(crate) fn close(&self) -> Result<bool> {
        let closed = self.close_on(self.stream)?;
        self.is_closed.store(closed, Ordering::Relaxed);
        Ok(closed)
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Relaxed)
    }

    /// Whether the caller's stream has come to the call, or cannot any more.
    pub(crate) fn is_ready(&self) -> bool {
        self.ready.is_done().unwrap_or(true)
    }

    /// Has a stream wait for the end, if it can.
    pub(crate) fn close_on(&self, stream: StreamId) -> Result<bool> {
        self.gate.as_ref().map(|gate| gate.close(&*self.device, stream)).transpose().map(|closed| closed.is_some())
    }

    /// The call has ended.
    pub(crate) fn open(&self) {
        if let Some(gate) = &self.gate {
            gate.open();
        }
    }
}

impl std::fmt::Debug for Lent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lent").field("device", &self.device.name()).field("on_device", &self.on_device).finish_non_exhaustive()
    }
}

/// How a device reduces for a call, or makes bools of bytes.
pub(super) fn reduction(call: &Call) -> Option<ReduceOp> {
    call.redop.or((call.dtype == DType::Bool).then_some(ReduceOp::Max))
}

impl Executor {
    pub(crate) fn driver(&self) -> Option<&Arc<dyn Driver>> {
        let devices = || if self.state.settings.devices { cuda::driver() } else { None };
        self.state.driver.get_or_init(devices).as_ref()
    }

    /// Another communicator of this process need not look for the devices again.
    pub(crate) fn pass_devices_on(&self, other: &Executor) {
        if let Some(driver) = self.state.driver.get() {
            let _ = other.state.driver.set(driver.clone());
        }
    }

    /// A device, by the number under which this process sees it.
    pub(crate) fn device(&self, ordinal: usize) -> Result<Arc<dyn Device>> {
        self.driver().ok_or_else(|| self.no_devices("device memory"))?.device(ordinal)
    }

    /// Why there are none.
    fn no_devices(&self, what: &'static str) -> Error {
        let why = match (cfg!(feature = "cuda"), self.state.settings.devices) {
            (false, _) => "this kolo was built without the feature `cuda`",
            (true, false) => "rank 0 found no driver on its machine, or KOLO_DEVICES (or the setting `devices`) is none there",
            (true, true) => "there is no CUDA driver here; `kolo doctor` says more",
        };
        Error::Unsupported { what, why: why.to_owned() }
    }

    /// Finds out whether a call's buffers are a device's. If so, or if it has a stream, it takes its turn there. A failure leaves
    /// everything as it was: nobody has heard of the call yet.
    pub(crate) fn lend(&self, call: &mut Call, stream: StreamId) -> Result<()> {
        self.try_to_lend(call, stream).map_err(|error| match error {
            Error::Device { .. } => Error::Unsupported { what: "a call on a device", why: error.to_string() },
            error => error,
        })
    }

    fn try_to_lend(&self, call: &mut Call, stream: StreamId) -> Result<()> {
        const NULL: StreamId = StreamId(0);
        let Some(driver) = self.driver() else {
            return if stream == NULL { Ok(()) } else { Err(self.no_devices("a stream")) };
        };
        let locate = |ptr: *const u8, len: usize| if len > 0 { driver.locate(ptr) } else { Ok(None) };
        let send = locate(call.send.ptr, call.send.len)?;
        let recv = locate(call.recv.ptr, call.recv.len)?;
        let on_device = [send.is_some(), recv.is_some()];
        let device = match (send, recv) {
            (Some(send), Some(recv)) if send.id() != recv.id() => {
                let why = format!("one is on {}, the other on {}; copy one of them", send.name(), recv.name());
                return Err(Error::Unsupported { what: "a call with buffers on two devices", why });
            }
            (Some(device), _) | (None, Some(device)) => device,
            (None, None) if stream == NULL => return Ok(()),
            (None, None) => driver.device_of(stream)?,
        };
        if device.is_capturing(stream)? {
            let why = "other ranks take part, on their hosts; call it outside of the capture".to_owned();
            return Err(Error::Unsupported { what: "a collective in a CUDA graph", why });
        }
        let ready = Event::new(&device)?;
        ready.record(stream)?;
        let gate = device.gates()?.and_then(|gates| gates.take());
        // On this thread, for it may wait for streams, of which none waits for this call yet.
        let prepared = if on_device.contains(&true) { device.prepare(call.dtype, reduction(call)) } else { Ok(()) };
        let has_kernels = prepared
            .inspect_err(|error| tracing::warn!(%error, "there are no kernels: what is on this device passes through the host"))
            .is_ok();
        let is_closed = AtomicBool::new(false);
        call.lent = Some(Arc::new(Lent { device, on_device, stream, ready, gate, is_closed, has_kernels }));
        Ok(())
    }

    /// Carries out a call on the buffers of a device, in the order of a stream that waits for nothing else, and waits for it.
    ///
    /// # Safety
    ///
    /// What the call reads and writes is valid until this returns, and nobody else uses it.
    pub(crate) unsafe fn run_on_device(&self, raw: &Raw<'_>, stream: StreamId) -> Result<()> {
        let mut call = self.prepare(raw)?;
        self.lend(&mut call, stream)?;
        self.state.check_process(call.op)?;
        if self.queue.is_idle()
            && let Some(mut core) = self.state.core.try_lock()
        {
            // SAFETY: passed on.
            return unsafe { self.state.carry_out(&mut core, &call) };
        }
        // Behind what was started before.
        // SAFETY: passed on; it is waited for.
        unsafe { self.start_prepared(call)?.wait() }
    }

    /// Waits for what a stream of the caller's was given, as an operation of this communicator would: not longer than those may take,
    /// nor beyond its end. To be called where no operation is under way.
    pub(crate) fn until_done(&self, event: &Event) -> Result<()> {
        let result = self.state.until(event, self.state.info.timeout, Op::AllReduce, None);
        result.map_err(|error| match error {
            Error::Aborted { .. } => self.state.fail(&mut self.state.core.lock(), error),
            error => error,
        })
    }

    /// On which device memory is.
    pub(crate) fn locate(&self, address: *const u8) -> Result<Option<Arc<dyn Device>>> {
        self.driver().map_or(Ok(None), |driver| driver.locate(address))
    }

    /// Queues a call that is lent, and waits for its end only if its stream does not.
    ///
    /// # Safety
    ///
    /// What the call reads and writes stays valid until its stream has come behind it, and nobody else uses it until then.
    pub(crate) unsafe fn enqueue(&self, call: &Call) -> Result<()> {
        self.check_not_failed()?;
        let waits = !self.close(call)?;
        let call = call.clone();
        // SAFETY: passed on.
        let work = unsafe { self.start_prepared(call)? };
        if waits { work.wait() } else { Ok(()) }
    }
}

impl Executor {
    /// A call whose failure nobody will wait for says that of an earlier one.
    pub(crate) fn check_not_failed(&self) -> Result<()> {
        match self.state.failure.get() {
            Some(first) => Err(Error::Revoked { first: first.clone() }),
            None => Ok(()),
        }
    }

    /// Has a call's stream wait for its end, if it can and may.
    ///
    /// The first call of a kind has to be waited for: memory is allocated, pinned and opened for it, and kernels are loaded. The
    /// driver may wait for all streams of the device then, and would wait for ever for one that waits for this call.
    pub(crate) fn close(&self, call: &Call) -> Result<bool> {
        let Some(lent) = &call.lent else { return Ok(false) };
        let is_large = call.bytes(self.world_size()) > SHORT;
        let is_known = !self.state.kinds.lock().insert((call.op, call.dtype, call.redop, is_large));
        // Where to put who sent is the caller's only until the call returns.
        if is_known && call.source.is_none() { lent.close() } else { Ok(false) }
    }
}
