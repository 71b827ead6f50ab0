use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

use super::area::Offer;
use super::fuzz::of_threads;
use super::stage::{Holder, Stage};
use parking_lot::Mutex;

/// Every communicator of a process has its own parts. Parts that every rank has left are used
/// again, zeroed.
#[test]
fn areas_are_used_again_when_every_rank_has_left() {
    let hosts = of_threads(2);
    let make = |first: usize| {
        let offer = hosts[0].offer(2);
        let areas: Vec<_> = (0..2).map(|rank| hosts[rank].accept(0, offer, rank, 2, Instant::now()).unwrap()).collect();
        hosts[0].confirm(offer, 2, &[0, 1]);
        assert_ne!(offer, Offer::NONE, "area {first}");
        (offer, areas)
    };
    let made: Vec<_> = (0..100).map(make).collect();
    let mut places: Vec<u64> = made.iter().map(|(offer, _)| offer.encode()).collect();
    places.sort_unstable();
    places.dedup();
    assert_eq!(places.len(), 100);
    let mut made = made.into_iter();
    let (first, mut areas) = made.next().unwrap();
    areas.iter_mut().for_each(super::area::Area::enter);
    // SAFETY: this is the first byte of a part, which no other thread uses.
    unsafe { areas[1].parts().at(1).write(7) };
    let other = areas.pop();
    drop(areas);
    let (second, kept) = make(100);
    assert_ne!(second, first, "a rank has not left");
    drop(other);
    let (third, areas) = make(101);
    assert_eq!(third, first);
    // SAFETY: this is the first byte of a part, which no other thread uses.
    assert_eq!(unsafe { areas[1].parts().at(1).read() }, 0);
    drop((kept, areas));
}

#[test]
fn an_offer_that_is_not_taken_is_free_at_once() {
    let hosts = of_threads(4);
    let offer = hosts[0].offer(4);
    hosts[0].confirm(offer, 4, &[]);
    assert_eq!(hosts[0].offer(4), offer);
    hosts[0].confirm(offer, 4, &[0, 2]);
    let rest = hosts[0].offer(2);
    assert_eq!(rest.encode(), offer.encode() + 2, "what a smaller part does not need is free");
    assert!(hosts[1].accept(0, Offer::decode(offer.encode() | 0xffff), 0, 4, Instant::now()).is_err());
}

#[test]
fn a_stage_is_found_when_its_owner_has_left() {
    let mut hosts = of_threads(2);
    let owner = hosts.pop().unwrap();
    let keeper: Arc<dyn Holder> = Arc::new(Keeper { stage: Mutex::new(None), is_read: AtomicBool::new(false) });
    let stages: Vec<Stage> = (0..12).map(|_| owner.take_stage(&Arc::downgrade(&keeper), true).unwrap().unwrap()).collect();
    // SAFETY: this is the first byte of a stage, which no other thread uses.
    (0..).zip(&stages).for_each(|(number, stage)| unsafe { stage.base().write(number) });
    let ids: Vec<u32> = stages.iter().map(|stage| stage.id).collect();
    drop((stages, owner));
    for (number, id) in (0..).zip(ids) {
        let stage = hosts[0].stage_of(1, id).unwrap();
        // SAFETY: this is the first byte of a stage, which no other thread uses.
        assert_eq!(unsafe { stage.read() }, number);
    }
    for (owner, id) in [(1, 0), (1, 13), (1, u32::MAX), (0, 2), (2, 1)] {
        assert_eq!(
            hosts[0].stage_of(owner, id).err().map(|error| error.kind()),
            Some(std::io::ErrorKind::NotFound),
            "{owner}, {id}"
        );
    }
}

struct Keeper {
    stage: Mutex<Option<Stage>>,
    is_read: AtomicBool,
}

impl Holder for Keeper {
    fn give_up(&self) -> Option<Stage> {
        if self.is_read.load(Ordering::Relaxed) { self.stage.lock().take() } else { None }
    }
}

/// A process makes a few stages, then lets them change hands. It makes more only if no holder can
/// give one up.
#[test]
fn stages_change_hands() {
    let host = &of_threads(2)[0];
    let keepers: Vec<Arc<Keeper>> =
        (0..100).map(|_| Arc::new(Keeper { stage: Mutex::new(None), is_read: AtomicBool::new(true) })).collect();
    let take = |keeper: &Arc<Keeper>, more| {
        let holder: Weak<dyn Holder> = Arc::downgrade(keeper) as _;
        let stage = host.take_stage(&holder, more).unwrap();
        let is_taken = stage.is_some();
        *keeper.stage.lock() = stage;
        is_taken
    };
    assert!(keepers.iter().all(|keeper| take(keeper, false)));
    let few = host.stages();
    assert!(few < 10, "{few} stages");
    let holding = || keepers.iter().filter(|keeper| keeper.stage.lock().is_some()).count();
    assert_eq!(holding(), few);
    keepers.iter().for_each(|keeper| keeper.is_read.store(false, Ordering::Relaxed));
    assert!(!take(&keepers[0], false), "every stage is being read");
    assert!(take(&keepers[0], true));
    assert_eq!((host.stages(), holding()), (few + 1, few + 1));
    // A communicator that is dropped leaves its stage until its readers have finished.
    let is_read = Arc::new(AtomicBool::new(false));
    let (stage, read) = (keepers[0].stage.lock().take().unwrap(), is_read.clone());
    let id = stage.id;
    host.park_stage(stage, Box::new(move |_| read.load(Ordering::Relaxed)));
    assert!(!take(&keepers[0], false));
    is_read.store(true, Ordering::Relaxed);
    assert!(take(&keepers[0], false));
    assert_eq!(keepers[0].stage.lock().as_ref().unwrap().id, id);
}
