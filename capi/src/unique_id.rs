//! Unique ids: the address of a store that one process serves, in a struct that a program passes to
//! its ranks.

use kolo::{Builder, Communicator};

use crate::boundary::boundary;
use crate::codes::kolo_result_t;
use crate::fault::Fault;
use crate::id::{self, Held};
use crate::pointers::{place, pointer};

/// What all ranks of kolo_comm_init_rank share. It contains the secret of the job: pass it to ranks
/// only. It can be copied, and is valid for one communicator.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kolo_unique_id_t {
    pub internal: [u8; 128],
}

/// Makes an id for the ranks of one communicator. One process calls this, usually that of rank 0,
/// and passes the id to the other ranks. This process serves the store of the start until all ranks
/// have connected.
///
/// The id contains the address of this host; `KOLO_INTERFACE` chooses the interface.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_get_unique_id(id: *mut kolo_unique_id_t) -> kolo_result_t {
    boundary(|| {
        // SAFETY: the caller's pointer is null or valid, as the header says.
        let id = unsafe { place(id, "id")? };
        id.write(kolo_unique_id_t { internal: id::make()? });
        Ok(())
    })
}

/// Stops serving the store of an id that this process has made and that no communicator will use.
/// Any other id has no effect.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kolo_discard_unique_id(id: *const kolo_unique_id_t) -> kolo_result_t {
    boundary(|| {
        pointer(id, "id")?;
        // SAFETY: the caller's pointer is valid, as the header says, and neither null nor misaligned.
        let (_, held) = rendezvous(Communicator::builder(), unsafe { &*id })?;
        drop(held);
        Ok(())
    })
}

/// Makes a rank connect at the store that an id names.
pub(crate) fn rendezvous(builder: Builder, id: &kolo_unique_id_t) -> Result<(Builder, Held), Fault> {
    let expected = "what kolo_get_unique_id of this version of kolo made";
    id::rendezvous(builder, &id.internal).ok_or_else(|| Fault::setting("id", "(not shown)", expected))
}
