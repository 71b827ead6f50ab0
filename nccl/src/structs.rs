//! The structs of `nccl.h`, field by field.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::mem::offset_of;

/// Defines structs of C, and the table of their fields with which a test compares NVIDIA's header.
macro_rules! structs {
    ($($(#[$meta:meta])* struct $name:ident { $($field:ident: $type:ty,)* })*) => {
        $(
            $(#[$meta])*
            #[repr(C)]
            #[derive(Clone, Copy)]
            pub(crate) struct $name { $(pub(crate) $field: $type,)* }
        )*

        /// Each struct with its size, and its fields with their offsets.
        #[allow(dead_code, reason = "a test of another crate reads it")]
        pub(crate) const LAYOUTS: &[(&str, usize, &[(&str, usize)])] = &[
            $((stringify!($name), size_of::<$name>(), &[$((stringify!($field), offset_of!($name, $field)),)*]),)*
        ];
    };
}

structs! {
    struct ncclUniqueId {
        internal: [u8; 128],
    }

    struct ncclConfig_t {
        size: usize,
        magic: c_uint,
        version: c_uint,
        blocking: c_int,
        cgaClusterSize: c_int,
        minCTAs: c_int,
        maxCTAs: c_int,
        netName: *const c_char,
        splitShare: c_int,
        trafficClass: c_int,
        commName: *const c_char,
        collnetEnable: c_int,
        CTAPolicy: c_int,
        shrinkShare: c_int,
        nvlsCTAs: c_int,
        nChannelsPerNetPeer: c_int,
        nvlinkCentricSched: c_int,
        graphUsageMode: c_int,
        numRmaCtx: c_int,
        maxP2pPeers: c_int,
        graphStreamOrdering: c_int,
        launchOrderImplicit: c_int,
        numRmaSig: c_int,
        rmaEagerInit: c_int,
        hostCftMode: c_int,
        nvlsHostMode: c_int,
    }

    struct ncclCollConfig_t {
        size: usize,
        magic: c_uint,
        version: c_uint,
        ext: *mut c_void,
        minCTAs: c_int,
        maxCTAs: c_int,
        nvlsCTAs: c_int,
        cgaClusterSize: c_int,
        algSelection: *const c_char,
        forceAlgSelection: c_int,
        CTAPolicy: c_int,
        userProfilerTag: u64,
        launchCompletionEvent: *mut c_void,
    }

    struct ncclSimInfo_t {
        size: usize,
        magic: c_uint,
        version: c_uint,
        estimatedTime: f32,
    }

    struct ncclEncryptionConfig_t {
        size: usize,
        magic: c_uint,
        version: c_uint,
        mode: c_int,
        psk: *const c_char,
    }

    struct ncclWaitSignalDesc_t {
        opCnt: c_int,
        peer: c_int,
        sigIdx: c_int,
        ctx: c_int,
    }

    struct ncclTeam_t {
        nRanks: c_int,
        rank: c_int,
        stride: c_int,
    }

    struct ncclCommProperties_t {
        size: usize,
        magic: c_uint,
        version: c_uint,
        rank: c_int,
        nRanks: c_int,
        cudaDev: c_int,
        nvmlDev: c_int,
        deviceApiSupport: bool,
        multimemSupport: bool,
        ginType: c_int,
        nLsaTeams: c_int,
        hostRmaSupport: bool,
        railedGinType: c_int,
        commHash: u64,
        ginMinStride: c_int,
        ginConnectionType: c_int,
        ginSupport: [bool; 64],
        devCommRuntimeVersionSize: usize,
        cftSupport: bool,
        cftMulticastSupport: bool,
        cftCountedSupport: bool,
    }
}
