//! The reducer, on ranks that are threads.

use kolo::ddp::{Parameter, Reducer};
use kolo::{Communicator, DType};

#[test]
fn gradients_are_averaged() {
    std::thread::scope(|scope| {
        for comm in Communicator::in_process(2).unwrap() {
            scope.spawn(move || {
                let parameters = (0..5).map(|i| Parameter::new(format!("p{i}"), [i + 1, 3], DType::F32));
                let mut reducer = Reducer::builder().parameters(parameters).first_bucket_bytes(16).build(&comm).unwrap();
                for round in 0..3 {
                    let step = reducer.begin().unwrap();
                    for i in (0..5).rev() {
                        let gradient = vec![(comm.rank() * 2 + i + round) as f32; 3 * (i + 1)];
                        step.put(i, &gradient).unwrap();
                    }
                    step.finish().unwrap();
                    for i in 0..5 {
                        assert_eq!(reducer.gradient::<f32>(i).unwrap(), vec![(1 + i + round) as f32; 3 * (i + 1)]);
                    }
                }
            });
        }
    });
}
