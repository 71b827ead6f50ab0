//! The reduction kernels, and a copy of as many bytes as the bound that memory sets. Throughput
//! counts the input.
//!
//! `cargo bench -p kolo-benches --bench kernels`

#![expect(missing_docs, reason = "the macros of criterion make a public function")]

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kolo::{Element, ReduceOp, bf16, f16, reduce_local};

/// Bytes of a buffer in a core's cache, and of one in memory.
const SIZES: [usize; 2] = [64 << 10, 64 << 20];

fn copy(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("copy");
    for bytes in SIZES {
        let (from, mut into) = (vec![1u8; bytes], vec![0u8; bytes]);
        group.throughput(Throughput::Bytes(bytes as u64));
        group.bench_function(BenchmarkId::from_parameter(bytes), |bencher| {
            bencher.iter(|| black_box(&mut into).copy_from_slice(black_box(&from)));
        });
    }
}

fn fold<T: Element>(criterion: &mut Criterion, one: T, redop: ReduceOp) {
    let mut group = criterion.benchmark_group(format!("{redop} {}", T::DTYPE));
    for bytes in SIZES {
        let count = bytes / size_of::<T>();
        let mut into = vec![one; count];
        for parts in [2, 4] {
            let buffers = vec![vec![one; count]; parts];
            let buffers: Vec<&[T]> = buffers.iter().map(Vec::as_slice).collect();
            group.throughput(Throughput::Bytes((bytes * parts) as u64));
            group.bench_function(BenchmarkId::new(format!("{parts} parts"), bytes), |bencher| {
                bencher.iter(|| reduce_local(black_box(&buffers), black_box(&mut into), redop).unwrap());
            });
        }
    }
}

fn folds(criterion: &mut Criterion) {
    fold(criterion, 1.0f32, ReduceOp::Sum);
    fold(criterion, 1.0f64, ReduceOp::Sum);
    fold(criterion, f16::ONE, ReduceOp::Sum);
    fold(criterion, bf16::ONE, ReduceOp::Sum);
    fold(criterion, 1i32, ReduceOp::Sum);
    fold(criterion, 1i8, ReduceOp::Sum);
    fold(criterion, 1.0f32, ReduceOp::Max);
    fold(criterion, 1.0f32, ReduceOp::Average);
    fold(criterion, 1u64, ReduceOp::BitXor);
}

criterion_group!(kernels, copy, folds);
criterion_main!(kernels);
