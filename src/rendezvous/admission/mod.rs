//! How processes join a job that has started: newcomers wait in a list, and the ranks admit them.
//!
//! 1. When the ranks of a communicator first call `grow`, its rank 0 opens a [`WaitingList`] in the
//!    store and announces it. The run info says how a newcomer learns the secret of the job.
//! 2. A [`Newcomer`] reads the run info, opens a listener, and writes its peer info to the first
//!    free place of the list.
//! 3. At each `grow`, rank 0 reads the places that were taken since, and connects to each newcomer's
//!    listener: a newcomer that has ended is passed over. The ranks of the communicator agree on what
//!    rank 0 has found.
//! 4. Rank 0 writes an [`Admission`] to the place of each newcomer. Then all ranks and newcomers go
//!    through the [`rendezvous`](super::rendezvous) as for a start of the job, in a part of the store
//!    that no other growth uses. They have the secret already.
//! 5. The ranks vote on the old communicator whether all of them have connected. If so, a barrier of
//!    the larger one tells the newcomers. Otherwise the newcomers wait for another growth.
//!
//! The old communicator takes no part in step 4, and stays usable whatever happens there.
//!
//! All values but the run info are [`signed`](super::signed) with the secret of the job and bound
//! to the list. A list is replaced after a growth that failed, and after a while, because stores
//! forget values. Newcomers then take a place in the new one.

mod job;
mod message;
mod newcomer;
mod waiting_list;
mod within;

pub(crate) use job::Job;
pub(crate) use newcomer::Newcomer;
pub(crate) use waiting_list::WaitingNewcomer;
pub(crate) use within::Within;
