//! Files of flight recorders, as `kolo trace` reads them: one, or two with a zero byte between.
#![no_main]
#![allow(dead_code, reason = "`kolo trace` uses the rest")]

#[path = "../../cli/src/trace/analysis.rs"]
mod analysis;
#[path = "../../cli/src/trace/dump.rs"]
mod dump;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let dumps: Vec<_> = bytes.split(|byte| *byte == 0).take(3).filter_map(|file| dump::Dump::parse(file).ok()).collect();
    if dumps.is_empty() {
        return;
    }
    if let Ok(job) = analysis::Job::new(dumps) {
        let _ = (job.silent(), job.lateness());
        if let Some(disagreement) = job.disagreement() {
            assert!(!disagreement.called.is_empty(), "a disagreement names no rank");
        }
    }
});
