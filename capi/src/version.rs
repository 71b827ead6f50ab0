//! The version, for programs that run with another library than that of their header.

use crate::boundary::boundary;
use crate::codes::kolo_result_t;
use crate::fault::Fault;

/// The version of this header, and of the library that it comes with.
pub const KOLO_VERSION_MAJOR: u32 = 0;
pub const KOLO_VERSION_MINOR: u32 = 1;
pub const KOLO_VERSION_PATCH: u32 = 0;
/// The version as one number: `10000 * major + 100 * minor + patch`.
pub const KOLO_VERSION: u32 = KOLO_VERSION_MAJOR * 10000 + KOLO_VERSION_MINOR * 100 + KOLO_VERSION_PATCH;

/// Returns the version of the loaded library, as KOLO_VERSION is that of the header.
#[unsafe(no_mangle)]
pub extern "C" fn kolo_version() -> u32 {
    KOLO_VERSION
}

/// Returns KOLO_OK if a program that was compiled with the header of the version `header` can use
/// the loaded library, otherwise KOLO_ERR_VERSION: the two have different ABIs. Pass KOLO_VERSION.
///
/// Programs in C and C++ need not call it, because the functions that make a communicator
/// (kolo_comm_init_env and the others) are also macros, which call it first. A program that loads
/// the library with dlopen, or from another language, calls it before any other function.
#[unsafe(no_mangle)]
pub extern "C" fn kolo_check_version(header: u32) -> kolo_result_t {
    boundary(|| match abi(header) == abi(KOLO_VERSION) {
        true => Ok(()),
        false => Err(Fault::Version { header: text(header), library: text(KOLO_VERSION) }),
    })
}

/// Returns the major version, and before 1.0 also the minor version: each may have another ABI.
fn abi(version: u32) -> (u32, u32) {
    match version / 10000 {
        0 => (0, version / 100),
        major => (major, 0),
    }
}

fn text(version: u32) -> String {
    format!("{}.{}.{}", version / 10000, version / 100 % 100, version % 100)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codes::{KOLO_ERR_VERSION, KOLO_OK};

    #[test]
    fn the_version_is_the_crates() {
        assert_eq!(text(KOLO_VERSION), env!("CARGO_PKG_VERSION"));
    }

    #[test]
    fn a_header_of_another_abi_is_refused() {
        assert_eq!(kolo_check_version(KOLO_VERSION), KOLO_OK);
        assert_eq!(kolo_check_version(KOLO_VERSION / 100 * 100 + 99), KOLO_OK);
        assert_eq!(kolo_check_version(KOLO_VERSION + 10000), KOLO_ERR_VERSION);
        assert_eq!(kolo_check_version(0), KOLO_ERR_VERSION);
    }

    #[test]
    fn minor_versions_differ_before_1_0() {
        assert_ne!(abi(100), abi(200));
        assert_eq!(abi(100), abi(107));
        assert_ne!(abi(9900), abi(10000));
        assert_eq!(abi(10000), abi(10203));
        assert_ne!(abi(10000), abi(20000));
    }
}
