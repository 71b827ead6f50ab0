//! The version, for programs that run with another library than that of their header.

/// The version of this header, and of the library that it comes with.
pub const KOLO_VERSION_MAJOR: u32 = 0;
pub const KOLO_VERSION_MINOR: u32 = 1;
pub const KOLO_VERSION_PATCH: u32 = 0;

/// Returns the version of the loaded library: `10000 * major + 100 * minor + patch`.
#[unsafe(no_mangle)]
pub extern "C" fn kolo_version() -> u32 {
    KOLO_VERSION_MAJOR * 10000 + KOLO_VERSION_MINOR * 100 + KOLO_VERSION_PATCH
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_is_the_crates() {
        let version = [KOLO_VERSION_MAJOR, KOLO_VERSION_MINOR, KOLO_VERSION_PATCH].map(|part| part.to_string());
        assert_eq!(version.join("."), env!("CARGO_PKG_VERSION"));
    }
}
