//! The limits of this process.

/// What is limited.
#[derive(Clone, Copy)]
pub(super) enum Resource {
    Descriptors,
    AddressSpace,
    #[allow(dead_code, reason = "only systems with shared memory ask for it")]
    FileSize,
}

/// Returns the limit of a resource, and the highest that this process may set; `u64::MAX` is none.
/// `None` if the system does not say. A call that is refused must not be taken for a limit.
pub(super) fn limit(resource: Resource) -> Option<[u64; 2]> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the call writes the struct, or fails.
    let result = unsafe {
        match resource {
            Resource::Descriptors => libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit),
            Resource::AddressSpace => libc::getrlimit(libc::RLIMIT_AS, &mut limit),
            Resource::FileSize => libc::getrlimit(libc::RLIMIT_FSIZE, &mut limit),
        }
    };
    #[allow(clippy::unnecessary_cast, reason = "the type has 32 bits on some systems")]
    let unlimited = |number: libc::rlim_t| if number == libc::RLIM_INFINITY { u64::MAX } else { number as u64 };
    if result == 0 { Some([limit.rlim_cur, limit.rlim_max].map(unlimited)) } else { listed(resource) }
}

/// Looks a limit up in the system's list of the limits of this process.
fn listed(resource: Resource) -> Option<[u64; 2]> {
    let name = match resource {
        Resource::Descriptors => "Max open files",
        Resource::AddressSpace => "Max address space",
        Resource::FileSize => "Max file size",
    };
    let list = std::fs::read_to_string("/proc/self/limits").ok()?;
    let mut words = list.lines().find_map(|line| line.strip_prefix(name))?.split_whitespace();
    let mut number = || match words.next()? {
        "unlimited" => Some(u64::MAX),
        word => word.parse().ok(),
    };
    Some([number()?, number()?])
}

#[cfg(all(test, target_os = "linux", not(miri)))]
mod tests {
    use super::*;

    #[test]
    fn the_list_says_what_the_call_says() {
        for resource in [Resource::Descriptors, Resource::AddressSpace, Resource::FileSize] {
            assert!(limit(resource).is_some());
            assert_eq!(limit(resource), listed(resource));
        }
    }
}
