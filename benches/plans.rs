//! The time to estimate the cost of every algorithm of a collective. The cost model generates
//! schedules of up to 256 ranks.
//!
//! `cargo bench -p kolo-benches --bench plans`

#![expect(missing_docs, reason = "the macros of criterion make a public function")]

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use kolo::Op;
use kolo::plan::{CostModel, Layout, candidates};

fn plans(criterion: &mut Criterion) {
    let model = CostModel::default();
    for op in [Op::AllReduce, Op::Broadcast, Op::AllToAll, Op::Barrier] {
        let mut group = criterion.benchmark_group(format!("{op}"));
        for ranks in [8, 64, 1024] {
            group.bench_function(BenchmarkId::new("ranks", ranks), |bencher| {
                bencher.iter(|| candidates(black_box(op), 1 << 20, Layout::even(ranks, ranks), &model));
            });
        }
    }
}

criterion_group!(benches, plans);
criterion_main!(benches);
