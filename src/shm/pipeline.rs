//! The phases of a collective whose data passes through slots: a rank stages a segment, combines it
//! and takes the result.

use super::flags::WORDS;
use super::registered::Loan;
use super::slots::Slots;
use super::wait::Sources;
use super::window::{Layout, Window};
use crate::error::Result;
use crate::failure::OpContext;

/// What a collective does between the phases.
pub(crate) trait Collective {
    /// Whether segments are combined between being staged and being taken.
    const COMBINES: bool;

    /// The number of segments.
    fn segments(&self) -> usize;

    /// Whether this rank stages anything.
    fn stages(&self) -> bool {
        true
    }

    /// Says whether slots are written by non-temporal copies from now on.
    fn set_streams(&mut self, _streams: bool) {}

    /// The most bytes of a slot in which a rank stages a segment. The same on all ranks.
    fn staged(&self) -> usize;

    /// The most bytes of a slot for a segment that a rank has combined. The same on all ranks.
    fn combined(&self) -> usize {
        0
    }

    /// Writes a segment of this rank's input to its slot.
    fn stage(&mut self, segment: usize, mine: *mut u8);

    /// Fetches the lines of the next slot that this rank will probably write, while it waits for
    /// its peers.
    fn prefetch(&self, _next: *mut u8) {}

    /// Reduces this rank's chunk of a segment that all ranks have staged, into its slot `mine` of the next
    /// phase or its output.
    fn combine(&mut self, _segment: usize, _slots: &Slots<'_>, _mine: *mut u8) {}

    /// Copies or reduces a segment from the slots in which ranks have staged it, or combined it, to the
    /// output.
    fn take(&mut self, segment: usize, slots: &Slots<'_>);
}

impl Window {
    /// Runs the first phase of an operation whose buffers may be registered, and returns its
    /// number. Tells the peers what this rank lends. If it lends nothing and `stages`, this is also
    /// the first phase of [`Window::pipeline`], which goes on with `from` 1. Ranks announce extents
    /// of their pools if `all_see` the words of all, which is the same on all ranks.
    pub(super) fn first_phase<D: Collective>(
        &mut self,
        context: &OpContext<'_>,
        sources: Sources,
        direct: &mut D,
        mine: Option<Loan>,
        stages: bool,
        all_see: bool,
    ) -> Result<u32> {
        let stages = stages && mine.is_none() && direct.stages();
        if stages {
            self.hold_stage(context)?;
        }
        let phase = self.phases.next();
        let words = self.words_of(mine, all_see);
        self.begin_phase(context, &words)?;
        if stages {
            direct.stage(0, self.slots(phase, direct.segments(), direct.staged()).of(self.rank));
        }
        self.phases.publish();
        let sources = match (sources, &self.layout) {
            // Every rank reads the line of every other, so there is nothing that groups could
            // spare.
            (Sources::All, Layout::Groups(_)) if all_see => Sources::Each,
            _ => sources,
        };
        self.wait_for(context, sources, phase)?;
        if all_see {
            self.map_announced(context, phase, words)?;
        }
        Ok(phase)
    }

    /// Runs the phases of one operation.
    ///
    /// In iteration i a rank stages segment i, combines segment i-1 and takes the segment that is
    /// complete: i-1, or i-2 if segments are combined first. Either is in the slots of the phase
    /// before. Each iteration publishes one phase. So ranks wait for each other once per segment,
    /// and then only for what the peers did one iteration earlier.
    ///
    /// `from` is 1 if this rank has staged the first segment and published its phase for operation
    /// `context`, otherwise 0.
    pub(super) fn pipeline<D: Collective>(
        &mut self,
        context: &OpContext<'_>,
        sources: Sources,
        from: usize,
        direct: &mut D,
    ) -> Result<()> {
        let (segments, staged, combined) = (direct.segments(), direct.staged(), direct.combined());
        let lag = 1 + usize::from(D::COMBINES);
        let first = self.phases.next().wrapping_sub(from as u32);
        let phase_of = |iteration: usize| first.wrapping_add(iteration as u32);
        if direct.stages() {
            self.hold_stage(context)?;
        }
        for i in from..segments + lag {
            let publishes = i + 1 < segments + lag;
            if publishes {
                self.begin_phase(context, &[0; WORDS])?;
            }
            if i < segments {
                direct.stage(i, self.slots(phase_of(i), segments, staged).of(self.rank));
            }
            if publishes && !D::COMBINES {
                self.phases.publish();
                direct.prefetch(self.slots(phase_of(i + 1), segments, staged).of(self.rank));
            }
            if i >= 1 {
                self.wait_for(context, sources, phase_of(i - 1))?;
            }
            if i == 1 {
                self.find_stages(context, sources)?;
            }
            if D::COMBINES && (1..=segments).contains(&i) {
                let mine = self.slots(phase_of(i), segments, combined).of(self.rank);
                direct.combine(i - 1, &self.slots(phase_of(i - 1), segments, staged), mine);
            }
            if publishes && D::COMBINES {
                self.phases.publish();
            }
            if i >= lag {
                direct.take(i - lag, &self.slots(phase_of(i - 1), segments, if D::COMBINES { combined } else { staged }));
            }
        }
        self.staged = self.phases.finish();
        Ok(())
    }
}
