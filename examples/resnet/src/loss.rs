//! Cross-entropy and accuracy of scores.

/// The loss and the accuracy of a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Outcome {
    /// Cross-entropy in nats, summed over the images.
    pub(crate) loss: f64,
    /// Images whose class has the highest score.
    pub(crate) correct: f64,
    pub(crate) images: f64,
}

impl Outcome {
    pub(crate) fn add(&mut self, other: Outcome) {
        self.loss += other.loss;
        self.correct += other.correct;
        self.images += other.images;
    }

    /// Returns the sums as numbers, which ranks exchange.
    pub(crate) fn numbers(&self) -> [f64; 3] {
        [self.loss, self.correct, self.images]
    }

    pub(crate) fn of([loss, correct, images]: [f64; 3]) -> Outcome {
        Outcome { loss, correct, images }
    }

    pub(crate) fn mean_loss(&self) -> f64 {
        self.loss / self.images.max(1.0)
    }

    /// Returns the accuracy, from 0 to 1.
    pub(crate) fn accuracy(&self) -> f64 {
        self.correct / self.images.max(1.0)
    }
}

/// Returns the outcome, and the gradient of the mean loss with respect to the scores, `[images,
/// classes]`.
pub(crate) fn cross_entropy(scores: &[f32], labels: &[usize]) -> (Outcome, Vec<f32>) {
    let classes = scores.len() / labels.len();
    let mut outcome = Outcome { images: labels.len() as f64, ..Outcome::default() };
    let mut gradient = vec![0.0; scores.len()];
    for ((scores, &label), gradient) in scores.chunks_exact(classes).zip(labels).zip(gradient.chunks_exact_mut(classes)) {
        let highest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        // Scores that are not finite give a loss that is not finite.
        let exponentials: Vec<f64> = scores.iter().map(|score| ((score - highest) as f64).exp()).collect();
        let sum: f64 = exponentials.iter().sum();
        outcome.loss += sum.ln() - (scores[label] - highest) as f64;
        if scores.iter().position(|&score| score == highest) == Some(label) {
            outcome.correct += 1.0;
        }
        for (class, (gradient, exponential)) in gradient.iter_mut().zip(&exponentials).enumerate() {
            let target = if class == label { 1.0 } else { 0.0 };
            *gradient = ((exponential / sum - target) / labels.len() as f64) as f32;
        }
    }
    (outcome, gradient)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gradient_is_that_of_the_loss() {
        let scores = [0.3f32, -1.2, 2.0, 0.1, 0.1, 0.0];
        let labels = [2, 0];
        let (outcome, gradient) = cross_entropy(&scores, &labels);
        assert_eq!((outcome.correct, outcome.images), (2.0, 2.0));
        for i in 0..scores.len() {
            let shifted = |by: f32| {
                let mut scores = scores;
                scores[i] += by;
                cross_entropy(&scores, &labels).0.mean_loss()
            };
            let slope = (shifted(1e-2) - shifted(-1e-2)) / 2e-2;
            assert!((slope - gradient[i] as f64).abs() < 1e-4, "{i}: {slope} {}", gradient[i]);
        }
    }

    #[test]
    fn large_scores_do_not_overflow_and_nan_is_not_hidden() {
        let (outcome, gradient) = cross_entropy(&[1e30, -1e30], &[0]);
        assert_eq!((outcome.loss, gradient), (0.0, vec![0.0, 0.0]));
        assert!(cross_entropy(&[f32::NAN, 0.0], &[0]).0.loss.is_nan());
    }
}
