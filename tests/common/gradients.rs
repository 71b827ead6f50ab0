//! What the tests of the reducer have in common.

use kolo::ddp::Parameter;
use kolo::{Communicator, DType};

use super::PATIENCE;

/// Runs `body` on every rank, and returns the results by rank.
pub(crate) fn on_ranks<R: Send>(world: usize, body: impl Fn(&Communicator) -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let comms = Communicator::builder().timeout(PATIENCE).connect_in_process(world).unwrap();
        let threads: Vec<_> = comms.into_iter().map(|comm| scope.spawn(|| body(&{ comm }))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Returns parameters of f32 with these numbers of elements.
pub(crate) fn floats(sizes: &[usize]) -> Vec<Parameter> {
    sizes.iter().enumerate().map(|(i, &size)| Parameter::new(format!("p{i}"), [size], DType::F32)).collect()
}

/// Runs `$body` with `$T` as the type of a parameter's gradient.
macro_rules! typed {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            kolo::DType::F32 => {
                type $T = f32;
                $body
            }
            kolo::DType::F64 => {
                type $T = f64;
                $body
            }
            kolo::DType::F16 => {
                type $T = kolo::f16;
                $body
            }
            kolo::DType::BF16 => {
                type $T = kolo::bf16;
                $body
            }
            _ => unreachable!(),
        }
    };
}
pub(crate) use typed;
