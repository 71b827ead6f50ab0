//! Which rank has caused the failure of a job.

use std::process::ExitStatus;
use std::sync::Arc;
use std::time::Duration;

use super::failures::{Name, Names};
use super::process;

/// The rank that caused a failure, and the rank that its own failure names, if it names one.
pub(super) struct Cause {
    pub(super) rank: FailedRank,
    pub(super) names: Option<usize>,
}

/// A rank of a job.
#[derive(Clone)]
pub(super) struct Member {
    pub(super) rank: usize,
    pub(super) pid: u32,
    /// The name of its host, if the job has hosts.
    pub(super) host: Option<Arc<str>>,
}

/// How a rank ended.
#[derive(Clone, PartialEq)]
pub(super) enum Ending {
    Status(ExitStatus),
    /// The connection to its host ended, for this reason. How the rank ended is unknown.
    Lost(Arc<str>),
}

/// A rank that has ended with a failure.
#[derive(Clone)]
pub(super) struct FailedRank {
    pub(super) member: Member,
    pub(super) ending: Ending,
    pub(super) after: Duration,
}

impl FailedRank {
    fn was_killed(&self) -> bool {
        match self.ending {
            Ending::Status(status) => process::was_killed(status),
            Ending::Lost(_) => true,
        }
    }
}

/// Returns the rank that caused a failure. Ranks that failed because of it may end first. Their
/// error names another failed rank. Of several causes, a rank that was killed comes first, since no
/// rank kills another, and then the one that ended first. If the errors name each other, the latest
/// one counts.
pub(super) fn cause(failed: &[FailedRank], names: &Names) -> Option<Cause> {
    let named = |name: &Name| failed.iter().find(|failed| failed.member.rank == name.rank);
    let name_of = |failed: &FailedRank| names.get(&failed.member.rank);
    let is_cause = |failed: &&FailedRank| name_of(failed).and_then(named).is_none();
    let causes: Vec<&FailedRank> = failed.iter().filter(is_cause).collect();
    let latest = failed.iter().filter_map(name_of).max_by_key(|name| name.written);
    let killed = causes.iter().copied().find(|failed| failed.was_killed());
    let rank = killed.or(causes.first().copied()).or(latest.and_then(named))?;
    let name = name_of(rank).filter(|name| named(name).is_none());
    Some(Cause { rank: rank.clone(), names: name.map(|name| name.rank) })
}

#[cfg(all(test, unix))]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::time::SystemTime;

    use super::*;

    fn failed(rank: usize, ending: Ending) -> FailedRank {
        FailedRank { member: Member { rank, pid: 1, host: None }, ending, after: Duration::ZERO }
    }

    #[test]
    fn the_latest_error_counts_if_errors_name_each_other() {
        let status = Ending::Status(ExitStatus::from_raw(1 << 8));
        let failed = [1, 0, 2].map(|rank| failed(rank, status.clone()));
        let cause_of = |names: &[(usize, usize, u64)]| {
            let name = |&(by, rank, at)| (by, Name { rank, written: SystemTime::UNIX_EPOCH + Duration::from_secs(at) });
            cause(&failed, &names.iter().map(name).collect()).map(|cause| (cause.rank.member.rank, cause.names)).unwrap()
        };
        assert_eq!(cause_of(&[(0, 2, 2), (1, 2, 3), (2, 0, 1)]), (2, None));
        assert_eq!(cause_of(&[(0, 2, 2), (1, 2, 3), (2, 0, 4)]), (0, None));
        assert_eq!(cause_of(&[(0, 2, 2), (1, 2, 3)]), (2, None));
        assert_eq!(cause_of(&[(0, 1, 2), (1, 3, 3), (2, 1, 4)]), (1, Some(3)));
    }

    /// The ranks that lose their peer may end before the launcher loses the host.
    #[test]
    fn a_host_that_was_lost_comes_before_a_rank_that_fails() {
        let failed = [failed(0, Ending::Status(ExitStatus::from_raw(1 << 8))), failed(1, Ending::Lost("it went".into()))];
        assert_eq!(cause(&failed, &Names::new()).unwrap().rank.member.rank, 1);
    }
}
