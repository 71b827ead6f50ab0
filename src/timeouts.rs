//! The timeouts of the protocol, and the pauses between its attempts. What a user can set is in
//! [`config`](crate::config).

use std::time::Duration;

// Waiting in general

/// How often a thread that waits for another rank checks whether that one will still come.
pub(crate) const WAIT_CHECK: Duration = Duration::from_millis(50);

/// The least time between two checks: links may wake a thread much more often than it asks, and a
/// check may wait for the lock of an interpreter.
pub(crate) const LEAST_WAIT_CHECK: Duration = Duration::from_millis(40);

/// The longest sleep of the engine, after which it checks deadlines and cancellation again.
pub(crate) const ENGINE_NAP: Duration = Duration::from_millis(500);

/// The longest sleep of a rank in shared memory, after which it checks whether it can go on
/// waiting.
pub(crate) const SHM_NAP: Duration = Duration::from_millis(50);

/// How long a rank waits for a file system that does not answer, while other ranks wait for this
/// one.
pub(crate) const FILE_SYSTEM: Duration = Duration::from_secs(1);

/// How long a thread of the library may take to end.
pub(crate) const THREAD_END: Duration = Duration::from_secs(5);

// Rendezvous

/// How long to wait for one key before checking for a new run info.
pub(crate) const RUN_INFO_CHECK: Duration = Duration::from_millis(300);

/// How much later than rank 0 the others give up, so that they read its reason.
pub(crate) const REASON_GRACE: Duration = Duration::from_secs(2);

/// The pause before reading again a value that has to change.
pub(crate) const VALUE_PAUSE: Duration = Duration::from_millis(10);

/// How long a rank waits before it checks whether the process that has its rank lives: a former
/// run may be about to end.
pub(crate) const RANK_CONFLICT: Duration = Duration::from_millis(700);

/// The least pause between two connections to an address that any process may have written.
pub(crate) const PROBE_PAUSE: Duration = Duration::from_millis(200);

/// How long before the deadline a rank probes the others, if rank 0 does not live. The others
/// still wait then.
pub(crate) const LAST_PROBE: Duration = Duration::from_secs(1);

/// The least time that ranks which have met give each other to connect.
pub(crate) const LEAST_TO_CONNECT: Duration = Duration::from_secs(1);

// Stores

/// How often a rank checks whether the lock of another job's file is held.
pub(crate) const FILE_LOCK_CHECK: Duration = Duration::from_secs(1);

/// How long a call to a file system may take in any case: file systems across hosts are slow.
pub(crate) const SHARED_FILE_SYSTEM: Duration = Duration::from_secs(2);

/// How long a rank waits before it reads the file again. The pause grows, so that many ranks that
/// wait for rank 0 do not take its processor. Rank 0, for which all wait, reads more often.
pub(crate) const SHORTEST_FILE_PAUSE: Duration = Duration::from_millis(1);
pub(crate) const LONGEST_FILE_PAUSE: Duration = Duration::from_millis(100);
pub(crate) const LONGEST_FILE_PAUSE_OF_RANK_0: Duration = Duration::from_millis(10);

/// How much longer than the timeout of a request its response may take.
pub(crate) const RESPONSE_GRACE: Duration = Duration::from_secs(5);

/// How long rank 0's process may be without a descriptor for another rank's connection.
pub(crate) const STORE_NO_DESCRIPTOR: Duration = Duration::from_secs(5);

/// How long to wait for a key before the thread asks again. A store may take a request for each.
pub(crate) const WATCHED_KEY: Duration = Duration::from_millis(100);

// Growth

/// How often a rank or a newcomer that waits for another one in a growth checks whether it is in
/// vain.
pub(crate) const GROWTH_CHECK: Duration = Duration::from_secs(1);

/// How long the query of that check may take.
pub(crate) const GROWTH_QUERY: Duration = Duration::from_millis(500);

/// When a waiting list is replaced. Stores keep values for an hour.
pub(crate) const LIST_LIFETIME: Duration = Duration::from_secs(600);

/// How long a waiting list may take to open after the first one.
pub(crate) const LIST_REOPENING: Duration = Duration::from_secs(5);

/// How long rank 0 opens no waiting list after one failed to open: the ranks would wait for it at
/// each growth.
pub(crate) const LIST_RETRY: Duration = Duration::from_secs(30);

/// A newcomer's pause before a store that failed is opened again, and before a value is read
/// again that has to change.
pub(crate) const NEWCOMER_PAUSE: Duration = Duration::from_millis(50);

/// How long rank 0 may take to connect to one newcomer, and to all.
pub(crate) const NEWCOMER_PROBE: Duration = Duration::from_secs(1);
pub(crate) const NEWCOMER_PROBES: Duration = Duration::from_secs(2);

/// How long the store may take for a value of the waiting list.
pub(crate) const LIST_VALUE: Duration = Duration::from_secs(5);

/// How long the store may take to learn that the job has ended.
pub(crate) const LIST_GOODBYE: Duration = Duration::from_millis(500);

// Connections

/// How long a peer may take for each message of the handshake.
pub(crate) const HANDSHAKE: Duration = Duration::from_secs(1);

/// The pause of a listener after a failure to accept.
pub(crate) const ACCEPT_PAUSE: Duration = Duration::from_millis(20);

/// The pause before an attempt whose predecessor's handshake ended early.
pub(crate) const HANDSHAKE_PAUSE: Duration = Duration::from_millis(5);

/// How long the system may take to connect before the attempt is repeated, at first and at most.
/// The system itself resends a lost packet after a second, and then at growing intervals.
pub(crate) const FIRST_CONNECT: Duration = Duration::from_millis(300);
pub(crate) const LONGEST_CONNECT: Duration = Duration::from_secs(5);

/// The pause after a failed attempt to connect, at first and at most.
pub(crate) const FIRST_CONNECT_PAUSE: Duration = Duration::from_millis(5);
pub(crate) const LONGEST_CONNECT_PAUSE: Duration = Duration::from_millis(200);

/// How long this process may have no descriptor left while it waits for a connection.
pub(crate) const NO_DESCRIPTOR: Duration = Duration::from_secs(1);

/// The pause before a region is fetched again, after a listener cut the handshake short.
pub(crate) const REGION_PAUSE: Duration = Duration::from_millis(1);

/// How long a client that reads metrics may take in all.
pub(crate) const METRICS_CLIENT: Duration = Duration::from_secs(2);

/// The pause of the server of metrics after a failure to accept.
pub(crate) const METRICS_ACCEPT_PAUSE: Duration = Duration::from_millis(100);

// Links

/// How long a rank that leaves waits for its last messages to fit into the links.
pub(crate) const LAST_MESSAGES: Duration = Duration::from_millis(100);

/// How long a link may be closed by a peer that never sent a message before that peer counts as
/// one that has left: the process of a killed rank ends a little after its links.
pub(crate) const UNHEARD_PEER: Duration = Duration::from_millis(500);

/// How long the link may receive nothing when some lanes have ended and others have not. A peer
/// that leaves closes all lanes at once, but bytes on some of them may still be in flight.
pub(crate) const LANES_ENDING: Duration = Duration::from_secs(2);

/// How long the other connections of a link may take once one of them is there. Then the link
/// opens without the rest.
pub(crate) const OTHER_RAILS: Duration = Duration::from_secs(1);

/// As [`OTHER_RAILS`], for the rank that accepts: longer, so that it does not open the link
/// without a connection that the peer counts on.
pub(crate) const OTHER_RAILS_OF_ACCEPTOR: Duration = Duration::from_secs(3);

/// How long a peer's system may leave a rail unanswered while it answers on another one, and how
/// long the first stripe of one rail may come after that of another: a link sends both when it is
/// made.
pub(crate) const RAIL_SILENCE: Duration = Duration::from_secs(2);

/// A rail that has been unanswered for so long makes the link ask on the others.
pub(crate) const RAIL_DOUBT: Duration = Duration::from_millis(500);

/// How often the thread `kolo-rails` looks after the links.
pub(crate) const RAIL_ROUND: Duration = Duration::from_millis(100);

/// How long a rail has to be lost before the log says so: a peer that ends closes all of them.
pub(crate) const RAIL_REPORT: Duration = Duration::from_secs(1);

/// How long a link that is dropped and has lost a rail waits until the peer's system has
/// everything. Tests wait longer, for slow machines.
pub(crate) const RAIL_LEAVING: Duration = Duration::from_millis(if cfg!(test) { 60_000 } else { 500 });

/// How long such a link waits while no connection has taken some of that, which is lost with the
/// link. The peer reads it when it comes to its next call.
pub(crate) const RAIL_HANDING_OVER: Duration = Duration::from_secs(if cfg!(test) { 60 } else { 10 });

/// How long later bytes wait for earlier ones before the link takes them out of the way: another
/// rail may have failed, and what it had may come behind them.
pub(crate) const RAIL_STALL: Duration = Duration::from_millis(100);

/// How long a sender that is far ahead of a stripe waits before it looks again whether that has
/// arrived.
pub(crate) const RAIL_LOOK: Duration = Duration::from_millis(5);

// Shared memory

/// How long a rank tries to map a peer's memory before it checks whether the peer still lives.
pub(crate) const MAPPING_CHECK: Duration = Duration::from_millis(500);

/// How long a rank tries to fetch an extent of a pool. Without that, operations stage their
/// memory; a peer that has no file descriptor left cannot hand it over at all.
pub(crate) const EXTENT: Duration = Duration::from_secs(2);

/// How long a rank that has failed waits for the peers that write into its registered buffers.
pub(crate) const WRITERS: Duration = Duration::from_millis(100);

/// How long such a rank waits beyond that if its buffers cannot become private memory.
pub(crate) const LAST_WRITERS: Duration = Duration::from_secs(10);

/// How long a rank waits for its peers to finish with a stage before it makes another one.
pub(crate) const READERS: Duration = Duration::from_millis(1);

// Failures

/// How long one rank may take to answer a query.
pub(crate) const QUERY: Duration = Duration::from_millis(500);

/// How often the failure detector looks for operations that wait.
pub(crate) const DETECTOR_LOOK: Duration = Duration::from_millis(50);

/// How long bytes must be in flight before a rate is computed. Over a shorter time, other work decides it.
pub(crate) const RATE_WINDOW: Duration = Duration::from_millis(500);

/// How long a link must carry little, while bytes are in flight, to count as slow.
pub(crate) const SLOW_LINK: Duration = Duration::from_secs(2);

/// How long an operation waits before its peer is asked, and the first pause before it is asked
/// again.
pub(crate) const FIRST_QUERY: Duration = Duration::from_millis(150);

/// The longest pause between two queries to the same peer.
pub(crate) const QUERY_PAUSE: Duration = Duration::from_secs(1);

/// How long an operation still waits for a rank that is gone: its last messages may be on the
/// way.
pub(crate) const LATE_MESSAGES: Duration = Duration::from_millis(200);

/// How long a rank may be out of reach after a query that got no answer. With the time before
/// that query, this is at most 5 s.
pub(crate) const PEER_OUT_OF_REACH: Duration = Duration::from_millis(3500);

/// How long an operation waits before a warning is logged about its peer.
pub(crate) const SUSPECT: Duration = Duration::from_secs(1);

/// The grace period of operations that the failed rank has completed.
pub(crate) const COMPLETED_GRACE: Duration = Duration::from_millis(250);

/// How old the last sign of a wait may be. A waiting operation renews it at each nap of the
/// engine and of shared memory; this is twice the nap, for slow hosts.
pub(crate) const WAIT_SIGN: Duration = Duration::from_millis(1000);

/// How long a peer that closed a link and still lives may take to report why.
pub(crate) const EXPLANATION: Duration = Duration::from_millis(60);

/// How long a peer may take that is diagnosing a failure itself.
pub(crate) const DIAGNOSING: Duration = Duration::from_secs(5);

/// How long a rank that has made the call may name no peer for which it waits. It names one
/// whenever it wakes, twice a second, but on an overloaded machine it wakes late.
pub(crate) const NO_PEER_NAMED: Duration = Duration::from_secs(1);

/// The pause before a diagnosis asks the same peer again.
pub(crate) const DIAGNOSIS_PAUSE: Duration = Duration::from_millis(5);

/// How long ranks that have not made the call yet may still make it, as long as no majority is
/// known.
pub(crate) const MISMATCH_UNDECIDED: Duration = Duration::from_millis(500);

/// How long ranks may be asked for their calls in all. The failure detector's thread waits for
/// that.
pub(crate) const MISMATCH_TOTAL: Duration = Duration::from_secs(1);

/// The first and the longest pause before ranks that have not made the call are asked again. Each
/// pause is twice as long as the one before.
pub(crate) const MISMATCH_PAUSE: Duration = Duration::from_millis(10);
pub(crate) const LONGEST_MISMATCH_PAUSE: Duration = Duration::from_millis(160);

/// How long one query of a shrink may take.
pub(crate) const SHRINK_QUERY: Duration = Duration::from_secs(1);

/// How long a rank that failed may take to show that it wants to continue.
pub(crate) const SHRINK_JOIN: Duration = Duration::from_secs(1);

/// How long a rank may be out of reach of a shrink.
pub(crate) const SHRINK_OUT_OF_REACH: Duration = Duration::from_secs(5);

/// How long the agreement of a shrink may last after the deadline. Ranks that are there by then
/// only have to answer each other.
pub(crate) const SHRINK_AFTER_DEADLINE: Duration = Duration::from_secs(10);

/// How often a shrink asks the deciding rank.
pub(crate) const SHRINK_ASK_AGAIN: Duration = Duration::from_millis(5);

/// How often a shrink asks the ranks that have not joined yet.
pub(crate) const SHRINK_CALL_AGAIN: Duration = Duration::from_millis(50);

// Calls in progress

/// How long another thread may hold a communicator's core: longer than all but an operation do.
pub(crate) const CORE_LOCK: Duration = Duration::from_millis(20);

/// How often the end of a communicator checks whether the operations have ended that only streams
/// wait for.
pub(crate) const CLOSING_CHECK: Duration = Duration::from_micros(200);

// Devices

/// How often a thread looks whether streams have left.
#[cfg(feature = "cuda")]
pub(crate) const STREAM_LOOK: Duration = Duration::from_millis(2);

/// How long the thread that watches streams waits for more before it ends.
#[cfg(feature = "cuda")]
pub(crate) const HELD_IDLE: Duration = Duration::from_secs(2);

/// How long this process waits for another one to hand over a file. A thread of that process does
/// nothing else.
#[cfg(feature = "cuda")]
pub(crate) const FILE_HANDOVER: Duration = Duration::from_secs(1);

/// How long a call opens allocations. Another process hands over its files, and may be slow.
#[cfg(feature = "cuda")]
pub(crate) const OPENING: Duration = Duration::from_millis(100);

/// How long a rank waits for the closing of areas of earlier communicators.
#[cfg(feature = "cuda")]
pub(crate) const AREAS_CLOSING: Duration = Duration::from_secs(5);

/// How long to wait for a stream after a failure, or before memory that it uses is freed.
#[cfg(feature = "cuda")]
pub(crate) const DEVICE_DRAIN: Duration = Duration::from_secs(5);

/// How much later than the deadline of a step the watchdog lets the streams continue.
#[cfg(feature = "cuda")]
pub(crate) const WATCHDOG_GRACE: Duration = Duration::from_millis(500);

/// How often the watchdog looks.
#[cfg(feature = "cuda")]
pub(crate) const WATCHDOG_LOOK: Duration = Duration::from_millis(100);
