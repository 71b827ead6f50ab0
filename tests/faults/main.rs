//! Fault injection into real processes, one fault each. A test is named after its row in
//! docs/faults.md.
//!
//! Without `KOLO_TEST_WORKER` this program is a test runner, which starts itself with that variable
//! as the ranks ([`rank`]). It prints and counts the tests that cannot run here.

#[cfg(any(target_os = "linux", windows))]
mod bystander;
#[cfg(any(target_os = "linux", windows))]
mod failure;
#[cfg(any(target_os = "linux", windows))]
mod job;
#[cfg(any(target_os = "linux", windows))]
mod log;
#[cfg(any(target_os = "linux", windows))]
mod processes;
#[cfg(any(target_os = "linux", windows))]
mod rank;
#[cfg(any(target_os = "linux", windows))]
#[path = "../common/runner.rs"]
mod runner;
#[cfg(any(target_os = "linux", windows))]
mod starts;
#[cfg(any(target_os = "linux", windows))]
mod strangers;
#[cfg(any(target_os = "linux", windows))]
mod system;
#[cfg(any(target_os = "linux", windows))]
#[path = "../common/wait.rs"]
mod wait;

#[cfg(not(any(target_os = "linux", windows)))]
fn main() {
    println!("NOT RUN: faults are injected on Linux and Windows only");
}

#[cfg(any(target_os = "linux", windows))]
const TESTS: &[runner::Test] = &[
    ("row_01_killed", processes::killed),
    ("row_02_stopped", processes::stopped),
    ("row_02_stopped_without_a_link", processes::stopped_without_a_link),
    ("row_02_stopped_in_a_part", processes::stopped_in_a_part),
    ("row_02_stopped_at_the_start", starts::stopped_at_the_start),
    ("row_03_left_early", processes::left_early),
    ("row_03_left_in_good_order", processes::left_in_good_order),
    ("row_03_left_and_ended", processes::left_and_ended),
    ("row_04_partition", system::partition),
    ("row_05_reset", system::reset),
    ("row_06_slow_and_lossy", system::slow_and_lossy),
    ("row_07_port_taken", starts::port_taken),
    ("row_08_stale_store", starts::stale_store),
    ("row_08_stale_store_of_missing_ranks", starts::stale_store_of_missing_ranks),
    ("row_09_two_jobs_on_one_store", starts::two_jobs),
    ("row_10_rank_twice", starts::rank_twice),
    ("row_10_rank_twice_without_a_secret", starts::rank_twice_without_a_secret),
    ("row_10_rank_twice_at_the_end_of_the_start", starts::rank_twice_at_the_end_of_the_start),
    ("row_11_missing_rank", starts::missing_rank),
    ("row_12_world_sizes", starts::world_sizes),
    ("row_13_to_15_different_calls", processes::different_calls),
    ("row_13_to_15_between_hosts", system::different_calls_between_hosts),
    ("row_24_dropped_with_work", processes::dropped_with_work),
    ("row_25_fork", system::forked),
    ("row_25_killed_with_a_child", system::killed_with_a_child),
    ("row_25_killed_with_a_child_elsewhere", system::killed_with_a_child_elsewhere),
    ("row_27_signals", system::signals),
    ("row_28_no_descriptors", system::no_descriptors),
    ("row_28_few_descriptors_at_the_start", system::few_descriptors),
    ("row_28_no_descriptors_for_the_store", system::no_descriptors_for_the_store),
    ("row_29_no_shared_memory", system::no_shared_memory),
    ("row_30_nothing_left_over", system::nothing_left_over),
    ("row_31_other_version", strangers::other_version),
    ("row_31_two_builds", strangers::two_builds),
    ("row_34_own_name_on_loopback", system::own_name_on_loopback),
    ("row_34_ipv6_only", system::ipv6_only),
    ("row_34_file_store_between_hosts", system::file_store),
    ("row_36_other_world_size", starts::other_world_size),
    ("row_37_garbage_connections", strangers::garbage),
    ("row_37_before_the_secret", strangers::before_the_secret),
    ("row_37_garbage_before_the_secret", strangers::garbage_before_the_secret),
    ("row_37_silent_strangers", strangers::silent),
    ("row_38_wrong_secret", strangers::wrong_secret),
    ("row_38_earlier_run", strangers::earlier_run),
    ("row_38_replayed_handshake", system::replayed),
    ("row_38_another_user", system::another_user),
    ("row_39_store_ends", starts::store_ends),
    ("row_40_uneven", processes::uneven),
    ("file_store_keeps_up", starts::file_keeps_up),
    ("missing_of_many_at_a_file", starts::missing_of_many),
    ("root_paused_at_the_start", starts::paused_root),
    ("row_51_registered_memory", bystander::registered_memory),
    ("row_51_registered_memory_of_a_stopped_rank", bystander::registered_memory_of_stopped),
    ("row_53_no_memory_in_time", system::no_memory_in_time),
    ("row_61_ended_in_a_message", processes::ended_in_a_message),
    ("row_67_no_thread", system::no_thread),
    ("row_68_no_memory_on_one_rank", system::no_memory_on_one_rank),
    ("row_70_closed_standard_descriptors", system::closed_standard),
    ("row_71_setuid", system::setuid),
    ("row_72_closefrom", system::close_all),
    ("row_73_ended_with_a_link", processes::ended_with_a_link),
    ("row_74_refused_calls", system::refused_calls),
    ("row_75_killed_with_a_message_that_waits", processes::killed_with_a_message),
    ("row_76_messages_that_do_not_fit", processes::messages_that_do_not_fit),
    ("row_77_a_message_that_nothing_receives", processes::never_received),
    ("survivors_go_on", processes::survivors_go_on),
    ("a_receive_from_any_rank_names_the_killed_rank", processes::any_names_the_killed),
    ("a_receive_from_any_rank_fails_with_the_killed_rank", processes::any_fails_with_the_killed),
    ("a_part_fails_and_the_whole_shrinks", processes::part_fails),
    ("killed_while_calls_cross", processes::killed_while_calls_cross),
    ("killed_while_splitting_apart", processes::killed_while_splitting_apart),
    ("killed_while_splitting", processes::killed_while_splitting),
    ("two_killed_at_once", processes::two_killed),
];

#[cfg(any(target_os = "linux", windows))]
fn main() -> std::process::ExitCode {
    if let Ok(task) = std::env::var(rank::WORKER) {
        match task.as_str() {
            "stranger" => system::be_a_stranger(),
            "privileged" => system::be_privileged(),
            task => rank::work(task),
        }
        return std::process::ExitCode::SUCCESS;
    }
    runner::run(TESTS, system::TESTS_AT_ONCE)
}
