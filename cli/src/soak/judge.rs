//! Decides whether the reports of the ranks fit the fault of the round.

use std::process::ExitStatus;

use super::rank::Report;
use super::script::{Fault, Round};
use crate::run::process::{describe, was_killed};
use crate::units::count;

/// How a rank ended.
pub(crate) struct Outcome {
    pub(crate) status: ExitStatus,
    pub(crate) report: Option<Report>,
    /// Its standard error.
    pub(crate) errors: String,
}

/// Returns an error unless the reports of the ranks fit the fault.
pub(crate) fn judge(round: &Round, ranks: &[Outcome]) -> Result<String, String> {
    if round.fault == Fault::Crash {
        return Ok("the next round starts at the same stores".to_owned());
    }
    let victim_ends = matches!(round.fault, Fault::Kill | Fault::Leave);
    let mut reports = reports(round, ranks, victim_ends)?;
    let failed = reports.iter().filter(|(_, report)| report.failure.is_some()).count();
    // In the last operation, the stopped rank may have sent everything that some peers need, or may
    // find everything that it needs when it continues. These ranks complete, and do not learn that
    // the others have given it up.
    let in_last = |report: &Report| match &report.failure {
        None => true,
        Some(failure) => reports.iter().all(|(_, other)| other.failure.is_some() || failure.after + 1 >= other.operations),
    };
    let mut unaware = 0;
    if round.fault.outlasts_the_deadline() && failed > 0 {
        let all_others = reports.iter().filter(|(rank, _)| *rank != round.victim).all(|(_, report)| in_last(report));
        let is_unaware = |(rank, report): &(usize, &Report)| report.failure.is_none() && (*rank == round.victim || all_others);
        unaware = reports.iter().filter(|report| is_unaware(report) && report.0 != round.victim).count();
        reports.retain(|report| !is_unaware(report));
    }
    // A stop in a step may come after the last operation. A stop before the first operation always
    // has an effect.
    let must_fail = victim_ends || round.fault == Fault::StopUnlinked;
    let may_fail = must_fail || matches!(round.fault, Fault::Stop | Fault::Cut);
    if failed == 0 && !must_fail {
        let operations = reports.first().map_or(0, |(_, report)| report.operations);
        return Ok(format!("{} by each rank", count(operations as usize, "operation")));
    }
    if !may_fail || failed < reports.len() {
        let said = reports.iter().map(|(rank, report)| match &report.failure {
            Some(failure) => format!("rank {rank}: {}", failure.text),
            None => format!("rank {rank} has not failed"),
        });
        return Err(format!("{failed} of {} failed: {}", count(reports.len(), "rank"), said.collect::<Vec<_>>().join("; ")));
    }
    agree(round, &reports)?;
    survivors(round, reports, unaware)
}

/// Returns the reports of the ranks, each with its rank. Returns an error for a rank that left
/// none, or a victim that did not end as planned.
fn reports<'a>(round: &Round, ranks: &'a [Outcome], victim_ends: bool) -> Result<Vec<(usize, &'a Report)>, String> {
    let mut reports: Vec<(usize, &Report)> = Vec::new();
    for (number, rank) in ranks.iter().enumerate() {
        let status = rank.status;
        if victim_ends && number == round.victim {
            let as_planned = if round.fault == Fault::Kill { was_killed(status) } else { status.success() };
            if !as_planned {
                return Err(format!("rank {number}, the victim, {}: {}", describe(status, 1), rank.errors));
            }
            continue;
        }
        match &rank.report {
            Some(report) if status.success() => reports.push((number, report)),
            _ => return Err(format!("rank {number} {}: {}", describe(status, 1), rank.errors.trim())),
        }
    }
    Ok(reports)
}

/// Returns an error unless the right ranks survive the failure; `unaware` ranks did not notice it.
fn survivors(round: &Round, mut reports: Vec<(usize, &Report)>, unaware: usize) -> Result<String, String> {
    // A stopped rank that continues may find no survivor, and then continues alone.
    let is_alone = |rank: usize, report: &Report| {
        round.fault.outlasts_the_deadline() && rank == round.victim && (report.excluded || report.survivors == Some(1))
    };
    reports.retain(|(rank, report)| !is_alone(*rank, report));
    let survivors = reports.iter().filter(|(_, report)| !report.excluded).count();
    for (rank, report) in reports.iter().filter(|(_, report)| !report.excluded) {
        if report.survivors != Some(survivors) {
            return Err(format!("rank {rank} went on among {:?}, but {survivors} went on: {reports:?}", report.survivors));
        }
    }
    // The victim of a cut survives like the others.
    let expected = if round.fault == Fault::Cut { round.ranks } else { round.ranks - 1 - unaware };
    // If only some ranks gave up the stopped rank, it may survive if it continues in time.
    let came_back = round.fault.outlasts_the_deadline()
        && survivors == round.ranks
        && reports.iter().any(|(_, report)| report.failure.as_ref().is_some_and(|failure| failure.on_part));
    if survivors != expected && !came_back {
        return Err(format!("{survivors} went on where {expected} could have: {reports:?}"));
    }
    let first = &reports.iter().find_map(|(_, report)| report.failure.as_ref()).map_or("", |failure| &failure.text);
    Ok(format!("{} went on after \"{first}\"", count(survivors, "rank")))
}

/// Returns an error unless all ranks name the same rank. One exception: a rank that fails on a part
/// of the ranks ends the communicator of all, and the reverse. The peers that it leaves may name
/// that rank.
fn agree(round: &Round, reports: &[(usize, &Report)]) -> Result<(), String> {
    let heralds: Vec<usize> = reports
        .iter()
        .filter(|(_, report)| report.failure.as_ref().is_some_and(|failure| failure.on_part))
        .map(|(rank, _)| *rank)
        .collect();
    let named: Vec<(usize, Option<usize>, bool)> = reports
        .iter()
        .filter_map(|(rank, report)| report.failure.as_ref().map(|failure| (*rank, failure.culprit, failure.on_part)))
        .collect();
    // A cut connection has two ends.
    if round.fault == Fault::Cut {
        let all_name = named.iter().all(|(_, culprit, _)| culprit.is_some());
        return if all_name { Ok(()) } else { Err(format!("a failure names no rank: {reports:?}")) };
    }
    for (rank, culprit, on_part) in named {
        let is_right = match culprit {
            Some(culprit) => culprit == round.victim || on_part || heralds.contains(&culprit),
            None => false,
        };
        // The victim itself learns that the others have given it up.
        if !is_right && rank != round.victim {
            return Err(format!("rank {rank} names {culprit:?} where rank {} was the cause: {reports:?}", round.victim));
        }
    }
    Ok(())
}

#[cfg(all(test, unix))]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::time::Duration;

    use super::super::rank::Failure;
    use super::super::script::{Ingredient, Path, Rendezvous};
    use super::*;

    fn round(fault: Fault) -> Round {
        let (path, rendezvous, after) = (Path::Tcp, Rendezvous::File, Duration::ZERO);
        let timeout = Duration::from_secs(1);
        let (seed, number, sockets, steps, with) = (1, 2, 1, 30, vec![Ingredient::Splits]);
        Round { seed, number, ranks: 4, path, rendezvous, sockets, fault, victim: 2, at: 5, after, steps, with, timeout }
    }

    fn ended(report: Report) -> Outcome {
        Outcome { status: ExitStatus::from_raw(0), report: Some(report), errors: String::new() }
    }

    fn failed(culprit: Option<usize>, on_part: bool, survivors: usize) -> Outcome {
        let failure = Failure { text: "it failed".to_owned(), culprit, on_part, after: 9 };
        ended(Report { operations: 9, failure: Some(failure), survivors: Some(survivors), excluded: false })
    }

    fn killed() -> Outcome {
        Outcome { status: ExitStatus::from_raw(9), report: None, errors: String::new() }
    }

    fn fine() -> Outcome {
        ended(Report { operations: 30, ..Report::default() })
    }

    #[test]
    fn what_fits_is_accepted() {
        judge(&round(Fault::Nothing), &[fine(), fine(), fine(), fine()]).unwrap();
        for pause in [Fault::Pause, Fault::PauseUnlinked] {
            judge(&round(pause), &[fine(), fine(), fine(), fine()]).unwrap();
        }
        let all = [failed(Some(2), false, 3), failed(Some(2), false, 3), killed(), failed(Some(2), false, 3)];
        assert!(judge(&round(Fault::Kill), &all).unwrap().contains("3 ranks went on"));
        // Rank 0 failed on a part of the ranks, and reported it to the others.
        let all = [failed(Some(2), true, 3), failed(Some(0), false, 3), killed(), failed(Some(2), false, 3)];
        judge(&round(Fault::Kill), &all).unwrap();
        let excluded = Report { excluded: true, survivors: None, ..failed(Some(0), false, 0).report.unwrap() };
        let all = [failed(Some(2), false, 3), failed(Some(2), false, 3), ended(excluded), failed(Some(2), false, 3)];
        judge(&round(Fault::Stop), &all).unwrap();
        let all = [failed(Some(2), false, 3), failed(Some(2), false, 3), fine(), failed(Some(2), false, 3)];
        judge(&round(Fault::Stop), &all).unwrap();
    }

    #[test]
    fn some_may_have_come_to_their_end() {
        let last = |survivors| {
            let failure = Failure { text: "it failed".to_owned(), culprit: Some(2), on_part: false, after: 29 };
            ended(Report { operations: 39, failure: Some(failure), survivors: Some(survivors), excluded: false })
        };
        let alone = || {
            let failure = Failure { text: "it failed".to_owned(), culprit: Some(0), on_part: false, after: 29 };
            ended(Report { operations: 39, failure: Some(failure), survivors: Some(1), excluded: false })
        };
        assert!(judge(&round(Fault::Stop), &[last(1), fine(), alone(), fine()]).unwrap().contains("1 rank went on"));
        assert!(judge(&round(Fault::Stop), &[last(2), fine(), alone(), last(2)]).unwrap().contains("2 ranks went on"));
        // Ranks that fail together continue together. Only in the last operation may a rank fail
        // alone.
        assert!(judge(&round(Fault::Stop), &[last(1), fine(), alone(), last(1)]).is_err());
        assert!(judge(&round(Fault::Stop), &[failed(Some(2), false, 1), fine(), alone(), fine()]).is_err());
    }

    #[test]
    fn who_was_stopped_may_come_back_if_only_some_had_given_it_up() {
        let [some, all] = [true, false].map(|on_part| {
            let ranks = [(Some(2), on_part), (Some(0), false), (Some(0), false), (Some(0), false)];
            judge(&round(Fault::Stop), &ranks.map(|(culprit, on_part)| failed(culprit, on_part, 4)))
        });
        assert!(some.unwrap().contains("4 ranks went on"));
        assert!(all.is_err());
    }

    #[test]
    fn what_does_not_fit_is_noticed() {
        let refused = |fault, ranks: [Outcome; 4], hint: &str| {
            let problem = judge(&round(fault), &ranks).unwrap_err();
            assert!(problem.contains(hint), "{hint}: {problem}");
        };
        let right = || failed(Some(2), false, 3);
        let wrong = Outcome { status: ExitStatus::from_raw(256), report: None, errors: "3 wrong elements".to_owned() };
        refused(Fault::Nothing, [fine(), wrong, fine(), fine()], "rank 1 exited with status 1: 3 wrong elements");
        refused(Fault::Nothing, [fine(), right(), fine(), fine()], "1 of 4 ranks failed");
        refused(Fault::Pause, [right(), right(), right(), right()], "4 of 4 ranks failed");
        refused(Fault::PauseUnlinked, [right(), right(), right(), right()], "4 of 4 ranks failed");
        refused(Fault::StopUnlinked, [fine(), fine(), fine(), fine()], "0 of 4 ranks failed");
        refused(Fault::Kill, [fine(), fine(), killed(), fine()], "0 of 3 ranks failed");
        refused(Fault::Stop, [fine(), right(), right(), right()], "3 of 4 ranks failed");
        refused(Fault::Kill, [right(), right(), fine(), right()], "the victim");
        refused(Fault::Kill, [right(), fine(), killed(), right()], "2 of 3 ranks failed");
        refused(Fault::Kill, [right(), failed(Some(0), false, 3), killed(), right()], "rank 1 names Some(0)");
        refused(Fault::Kill, [right(), failed(None, false, 3), killed(), right()], "rank 1 names None");
        refused(Fault::Kill, [right(), failed(Some(2), false, 2), killed(), right()], "rank 1 went on among Some(2)");
        refused(Fault::Cut, [failed(None, false, 4), right(), right(), right()], "names no rank");
    }
}
