//! The configuration of a communicator, and that of one call.

use std::ffi::{CStr, c_int};
use std::mem::offset_of;

use crate::codes::{API_MAGIC, UNDEF_INT, VERSION};
use crate::environment::number;
use crate::fault::Fault;
use crate::pointers::pointer;
use crate::structs::{ncclCollConfig_t, ncclConfig_t};

/// What this library takes from a configuration.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    pub(crate) blocking: bool,
    /// The name of the communicator in messages.
    pub(crate) name: Option<String>,
}

impl Default for Config {
    fn default() -> Config {
        Config { blocking: number("NCCL_COMM_BLOCKING") != Some(0), name: None }
    }
}

const UNDEFINED: ncclConfig_t = ncclConfig_t {
    size: size_of::<ncclConfig_t>(),
    magic: API_MAGIC,
    version: VERSION as u32,
    blocking: UNDEF_INT,
    cgaClusterSize: UNDEF_INT,
    minCTAs: UNDEF_INT,
    maxCTAs: UNDEF_INT,
    netName: std::ptr::null(),
    splitShare: UNDEF_INT,
    trafficClass: UNDEF_INT,
    commName: std::ptr::null(),
    collnetEnable: UNDEF_INT,
    CTAPolicy: UNDEF_INT,
    shrinkShare: UNDEF_INT,
    nvlsCTAs: UNDEF_INT,
    nChannelsPerNetPeer: UNDEF_INT,
    nvlinkCentricSched: UNDEF_INT,
    graphUsageMode: UNDEF_INT,
    numRmaCtx: UNDEF_INT,
    maxP2pPeers: UNDEF_INT,
    graphStreamOrdering: UNDEF_INT,
    launchOrderImplicit: UNDEF_INT,
    numRmaSig: UNDEF_INT,
    rmaEagerInit: UNDEF_INT,
    hostCftMode: UNDEF_INT,
    nvlsHostMode: UNDEF_INT,
};

/// Copies a struct that begins with its size over `known`: an older program has fewer fields, a newer
/// one has more, which are not read.
///
/// # Safety
///
/// `from` is null, misaligned or valid for reading as many bytes as it says. `T` is a struct of
/// [`crate::structs`] that begins with `size` and `magic`, and every bit pattern is a value of it.
pub(crate) unsafe fn copy_sized<T>(
    from: *const T,
    mut known: T,
    magic: u32,
    least: usize,
    what: &'static str,
) -> Result<T, Fault> {
    pointer(from, what)?;
    // SAFETY: passed on: the struct begins with a size and a number.
    let (size, given) = unsafe { (from.cast::<usize>().read(), from.cast::<u8>().add(size_of::<usize>()).cast::<u32>().read()) };
    if given != magic {
        return Err(Fault::argument(format!(
            "{what} was not set by its initializer: its magic number is {given:#x}, not {magic:#x}"
        )));
    }
    if size < least {
        return Err(Fault::argument(format!("{what}->size is {size}; it must be at least {least}, as the initializer sets it")));
    }
    // SAFETY: the source has `size` bytes, as the caller says, and the target is a `T`.
    unsafe { std::ptr::copy_nonoverlapping(from.cast::<u8>(), (&raw mut known).cast(), size.min(size_of::<T>())) };
    Ok(known)
}

/// Reads the configuration of a communicator. Without one, it is the other one's; what one leaves
/// undefined is the default.
///
/// # Safety
///
/// `config` is null, misaligned or valid for reading as many bytes as it says, and its texts end with
/// a zero.
pub(crate) unsafe fn read(config: *const ncclConfig_t, inherited: &Config) -> Result<Config, Fault> {
    if config.is_null() {
        return Ok(inherited.clone());
    }
    // SAFETY: passed on. All fields are numbers and pointers.
    let config = unsafe { copy_sized(config, UNDEFINED, API_MAGIC, offset_of!(ncclConfig_t, cgaClusterSize), "config")? };
    let is_known = |value: c_int, allowed: std::ops::RangeInclusive<c_int>, what: &str| {
        if value == UNDEF_INT || allowed.contains(&value) {
            return Ok(());
        }
        let (least, most) = allowed.into_inner();
        let limit = if most == c_int::MAX { format!("at least {least}") } else { format!("from {least} to {most}") };
        Err(Fault::argument(format!("config->{what} is {value}; it must be {limit}, or NCCL_CONFIG_UNDEF_INT")))
    };
    is_known(config.blocking, 0..=1, "blocking")?;
    is_known(config.cgaClusterSize, 0..=8, "cgaClusterSize")?;
    is_known(config.minCTAs, 1..=c_int::MAX, "minCTAs")?;
    is_known(config.maxCTAs, 1..=c_int::MAX, "maxCTAs")?;
    is_known(config.splitShare, 0..=1, "splitShare")?;
    is_known(config.shrinkShare, 0..=1, "shrinkShare")?;
    if config.minCTAs != UNDEF_INT && config.maxCTAs != UNDEF_INT && config.minCTAs > config.maxCTAs {
        let problem = format!("config->minCTAs is {}, more than config->maxCTAs, {}", config.minCTAs, config.maxCTAs);
        return Err(Fault::Argument(problem));
    }
    // SAFETY: passed on.
    let name = (!config.commName.is_null()).then(|| unsafe { CStr::from_ptr(config.commName) }.to_string_lossy().into_owned());
    let blocking = match number("NCCL_COMM_BLOCKING") {
        Some(number) => number != 0,
        None => config.blocking != 0,
    };
    Ok(Config { blocking, name })
}

/// Checks the configuration of one call, which may be null. The hints in it have no effect.
///
/// # Safety
///
/// As for [`read`].
pub(crate) unsafe fn check_call(config: *const ncclCollConfig_t) -> Result<(), Fault> {
    if config.is_null() {
        return Ok(());
    }
    let undefined = ncclCollConfig_t {
        size: size_of::<ncclCollConfig_t>(),
        magic: API_MAGIC,
        version: VERSION as u32,
        ext: std::ptr::null_mut(),
        minCTAs: UNDEF_INT,
        maxCTAs: UNDEF_INT,
        nvlsCTAs: UNDEF_INT,
        cgaClusterSize: UNDEF_INT,
        algSelection: std::ptr::null(),
        forceAlgSelection: 1,
        CTAPolicy: UNDEF_INT,
        userProfilerTag: 0,
        launchCompletionEvent: std::ptr::null_mut(),
    };
    // SAFETY: passed on. All fields are numbers and pointers.
    let config = unsafe { copy_sized(config, undefined, API_MAGIC, offset_of!(ncclCollConfig_t, ext), "config")? };
    // SAFETY: passed on.
    let selects = !config.algSelection.is_null() && unsafe { *config.algSelection } != 0;
    if selects && config.forceAlgSelection != 0 {
        let why = "kolo has other algorithms than NCCL; leave it NULL, set forceAlgSelection to 0, or set KOLO_ALGORITHM";
        return Err(Fault::unavailable("config->algSelection", why));
    }
    if !config.launchCompletionEvent.is_null() {
        let why = "kolo launches no single kernel; record an event on the stream after the call";
        return Err(Fault::unavailable("config->launchCompletionEvent", why));
    }
    Ok(())
}
