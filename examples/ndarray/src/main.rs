//! Principal components of rows that are spread over the ranks, with the arrays of ndarray.
//!
//! `cargo build -p kolo-ndarray`, then `kolo run -n 3 -- target/debug/ndarray [ROWS]` with the
//! number of rows of rank 0. Each rank has one row more than the rank before it. Compares the result
//! with that of one rank that has all rows, and fails if they differ.

use std::process::ExitCode;

use kolo::{Communicator, Element, ReduceOp};
use ndarray::{Array, Array1, Array2, ArrayBase, ArrayView, Axis, DataMut, Dimension, ShapeError, s};

type Error = Box<dyn std::error::Error>;

const COLUMNS: usize = 6;
const COMPONENTS: usize = 2;
/// The largest relative difference between sums in different orders.
const TOLERANCE: f64 = 1e-9;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Error> {
    let count =
        std::env::args().nth(1).map_or(Ok(1000), |count| count.parse().map_err(|_| format!("{count}: give a whole number")))?;
    let comm = Communicator::from_env()?;
    // An array in column-major order, as many files have it. Its rows are not contiguous.
    let table = draw(comm.rank() as u64, count + comm.rank());
    let rows = table.t();

    let counts: Vec<usize> = (0..comm.world_size()).map(|rank| count + rank).collect();
    let total = counts.iter().sum::<usize>() as f64;
    let mut mean = rows.sum_axis(Axis(0)) / total;
    all_reduce(&comm, &mut mean, ReduceOp::Sum)?;
    let centred = &rows - &mean;
    let mut covariance = centred.t().dot(&centred) / (total - 1.0);
    all_reduce(&comm, &mut covariance, ReduceOp::Sum)?;
    // All ranks have the same bits, so all of them find the same components.
    let (variances, components) = principal(covariance.clone());
    let scores = all_gather_rows(&comm, &centred.dot(&components), &counts)?;

    // One rank with all rows.
    let all = all_gather_rows(&comm, &rows, &counts)?;
    let mean_alone = all.sum_axis(Axis(0)) / total;
    let centred_alone = &all - &mean_alone;
    let covariance_alone = centred_alone.t().dot(&centred_alone) / (total - 1.0);
    let (variances_alone, components_alone) = principal(covariance_alone.clone());
    expect_close("the mean", &mean, &mean_alone)?;
    expect_close("the covariance", &covariance, &covariance_alone)?;
    expect_close("the variances", &variances, &variances_alone)?;
    expect_close("the scores", &scores, &centred_alone.dot(&components_alone))?;

    // A view that is not contiguous is reduced in place: the rest of the array keeps its values.
    let mut grid = Array2::from_elem((4, 4), comm.rank() as f64);
    all_reduce(&comm, &mut grid.slice_mut(s![.., 1..3]), ReduceOp::Max)?;
    let mut expected = Array2::from_elem((4, 4), comm.rank() as f64);
    expected.slice_mut(s![.., 1..3]).fill((comm.world_size() - 1) as f64);
    expect_close("the grid", &grid, &expected)?;

    if comm.rank() == 0 {
        let share = 100.0 * variances.sum() / covariance.diag().sum();
        println!("{total} rows, {COMPONENTS} of {COLUMNS} components have {share:.1} % of the variance: {variances:.3}");
    }
    Ok(())
}

/// Reduces the elements of an array or view over all ranks, in place and in logical order.
///
/// The memory of an array may be in row-major or in column-major order, or have gaps. The ranks'
/// memory need not be in the same order: kolo gets a copy where it is not row-major.
fn all_reduce<T, S, D>(comm: &Communicator, array: &mut ArrayBase<S, D>, op: ReduceOp) -> kolo::Result<()>
where
    T: Element,
    S: DataMut<Elem = T>,
    D: Dimension,
{
    if let Some(elements) = array.as_slice_mut() {
        return comm.all_reduce(elements, op);
    }
    let mut elements: Vec<T> = array.iter().copied().collect();
    comm.all_reduce(&mut elements, op)?;
    array.iter_mut().zip(elements).for_each(|(place, element)| *place = element);
    Ok(())
}

/// Returns the rows of all ranks in order of rank. `counts` has the number of rows of each rank.
fn all_gather_rows<T: Element + Default, S: ndarray::Data<Elem = T>>(
    comm: &Communicator,
    rows: &ArrayBase<S, ndarray::Ix2>,
    counts: &[usize],
) -> Result<Array2<T>, Error> {
    // Copies only if the rows are not in row-major order.
    let send = rows.as_standard_layout();
    let send = send.as_slice().ok_or("an array in standard layout is contiguous")?;
    let counts: Vec<usize> = counts.iter().map(|count| count * rows.ncols()).collect();
    let mut recv = vec![T::default(); counts.iter().sum()];
    comm.all_gather_v(send, &mut recv, &counts)?;
    let shape = (recv.len() / rows.ncols(), rows.ncols());
    Array2::from_shape_vec(shape, recv).map_err(|error: ShapeError| error.into())
}

/// Returns the largest eigenvalues of a symmetric matrix and their eigenvectors, in columns: Jacobi
/// rotations (1846) until the other elements are zero.
fn principal(mut matrix: Array2<f64>) -> (Array1<f64>, Array2<f64>) {
    let mut vectors = Array2::eye(COLUMNS);
    for _ in 0..30 {
        for (p, q) in (0..COLUMNS).flat_map(|p| (p + 1..COLUMNS).map(move |q| (p, q))) {
            if matrix[[p, q]].abs() < 1e-300 {
                continue;
            }
            let theta = (matrix[[q, q]] - matrix[[p, p]]) / (2.0 * matrix[[p, q]]);
            let tangent = theta.signum() / (theta.abs() + theta.hypot(1.0));
            let cosine = 1.0 / tangent.hypot(1.0);
            let mut rotation = Array2::eye(COLUMNS);
            rotation[[p, p]] = cosine;
            rotation[[q, q]] = cosine;
            rotation[[p, q]] = tangent * cosine;
            rotation[[q, p]] = -tangent * cosine;
            matrix = rotation.t().dot(&matrix).dot(&rotation);
            vectors = vectors.dot(&rotation);
        }
    }
    let mut order: Vec<usize> = (0..COLUMNS).collect();
    order.sort_by(|&one, &other| matrix[[other, other]].total_cmp(&matrix[[one, one]]));
    order.truncate(COMPONENTS);
    let mut vectors = vectors.select(Axis(1), &order);
    // The sign of an eigenvector is free: the largest element is positive.
    for mut vector in vectors.columns_mut() {
        let largest = vector.iter().copied().fold(0.0, |most: f64, value| if value.abs() > most.abs() { value } else { most });
        vector *= largest.signum();
    }
    (matrix.diag().select(Axis(0), &order), vectors)
}

/// Draws points near a plane, one in each column, with the generator xorshift64 (Marsaglia 2003).
fn draw(seed: u64, count: usize) -> Array2<f64> {
    let mut state = seed + 0x9E37_79B9_7F4A_7C15;
    let mut random = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as f64 / u64::MAX as f64 - 0.5
    };
    let plane = Array::from_shape_fn((COLUMNS, COMPONENTS), |(i, j)| ((i + 1) as f64).powi(j as i32 + 1) / (4 * j + 1) as f64);
    let places = Array::from_shape_simple_fn((COMPONENTS, count), &mut random);
    plane.dot(&places) + Array::from_shape_simple_fn((COLUMNS, count), random) * 0.5
}

fn expect_close<D: Dimension>(what: &str, found: &Array<f64, D>, expected: &Array<f64, D>) -> Result<(), Error> {
    let largest = |view: ArrayView<'_, f64, D>| view.iter().fold(0.0f64, |most, value| most.max(value.abs()));
    let difference = largest((found - expected).view()) / largest(expected.view()).max(1.0);
    // NaN is not close.
    if difference <= TOLERANCE {
        return Ok(());
    }
    Err(format!("{what} of the ranks differs by {difference:e} from that of one rank").into())
}
