//! Forked children, for tests.

/// Returns what `f` returns in a forked child, or `None` if the child does not end.
pub(crate) fn is_so_in_a_child(f: impl Fn() -> bool) -> Option<bool> {
    // SAFETY: the child runs the function that is tested, and ends without running its parent's
    // code.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let is_so = f();
        // SAFETY: ends this process.
        unsafe { libc::_exit(i32::from(!is_so)) };
    }
    assert!(child > 0, "no fork");
    let late = std::time::Instant::now() + std::time::Duration::from_secs(60);
    let mut status = 0;
    // SAFETY: the child is this process's, and `status` lives.
    while unsafe { libc::waitpid(child, &mut status, libc::WNOHANG) } == 0 {
        if std::time::Instant::now() > late {
            // SAFETY: as above; the child has not been waited for.
            unsafe { libc::kill(child, libc::SIGKILL) };
            // SAFETY: as above.
            unsafe { libc::waitpid(child, &mut status, 0) };
            return None;
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    Some(status == 0)
}
