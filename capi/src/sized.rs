//! Structs that grow. A program may have been compiled with another header than this library's: its struct is shorter or longer, and
//! says in its first field how long it is.

use std::mem::MaybeUninit;

use crate::fault::Fault;
use crate::pointers::pointer;

/// A struct of the header that may get more fields at its end.
///
/// # Safety
///
/// It is `repr(C)`, begins with a `usize`, and is valid if all its bytes are zero. `FIRST` is from its first field on, and at most all.
pub(crate) unsafe trait Grows: Copy {
    /// What errors call a pointer to one, and its first field.
    const NAMES: (&'static str, &'static str);
    /// How large it was in the first header. Never changes.
    const FIRST: usize;
}

/// The last byte of a struct's field, and one.
macro_rules! end_of {
    ($type:ty, $field:ident: $of:ty) => {
        std::mem::offset_of!($type, $field) + size_of::<$of>()
    };
}
pub(crate) use end_of;

/// No struct of this library will ever be as large; a length that was not set may be.
const LONGEST: usize = 1 << 16;

/// What the caller's struct says. What it lacks is zero, which is not set; what it has more must be.
///
/// # Safety
///
/// `from` is null, misaligned, or points to as many bytes as its first field says.
pub(crate) unsafe fn read<T: Grows>(from: *const T) -> Result<T, Fault> {
    // SAFETY: passed on.
    let size = unsafe { size_at(from)? };
    let known = size_of::<T>().min(size);
    // SAFETY: passed on: there are as many bytes.
    let bytes = unsafe { std::slice::from_raw_parts(from.cast::<MaybeUninit<u8>>(), size) };
    // SAFETY: what is beyond is fields of a newer header, which the caller has set: zeros, at least.
    if bytes[known..].iter().any(|byte| unsafe { byte.assume_init() } != 0) {
        let expected = format!(
            "this kolo knows {known} bytes of it, and what is beyond is not 0; the header is newer than the library: install the library \
             that it came with"
        );
        return Err(Fault::value(T::NAMES.1, size as i64, expected));
    }
    let mut read = MaybeUninit::<T>::zeroed();
    // SAFETY: both have as many bytes, and they are apart. Zeros are valid, and so is what the caller has set.
    unsafe {
        std::ptr::copy_nonoverlapping(from.cast::<u8>(), read.as_mut_ptr().cast::<u8>(), known);
        Ok(read.assume_init())
    }
}

/// Fills in the caller's struct, as far as that goes, but for its size. What it has more stays as it is.
///
/// # Safety
///
/// As for [`read`], and it can be written.
pub(crate) unsafe fn write<T: Grows>(to: *mut T, value: &T) -> Result<(), Fault> {
    // SAFETY: passed on.
    let known = unsafe { size_at(to)? }.min(size_of::<T>());
    let (from, after) = (std::ptr::from_ref(value).cast::<u8>(), size_of::<usize>());
    // SAFETY: both have as many bytes, and they are apart.
    unsafe { std::ptr::copy_nonoverlapping(from.add(after), to.cast::<u8>().add(after), known - after) };
    Ok(())
}

/// # Safety
///
/// As for [`read`].
unsafe fn size_at<T: Grows>(at: *const T) -> Result<usize, Fault> {
    pointer(at, T::NAMES.0)?;
    // SAFETY: passed on; whatever its version, it begins with its size.
    let size = unsafe { at.cast::<usize>().read() };
    match (T::FIRST..=LONGEST).contains(&size) {
        true => Ok(size),
        false => Err(Fault::value(T::NAMES.1, i64::try_from(size).unwrap_or(-1), "set it to the sizeof of its type")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(C)]
    #[derive(Clone, Copy, Debug, PartialEq)]
    struct Grown {
        size: usize,
        old: u32,
        older: u32,
        new: u64,
    }

    // SAFETY: it begins with its size, and numbers may be zero.
    unsafe impl Grows for Grown {
        const NAMES: (&'static str, &'static str) = ("grown", "grown->size");
        const FIRST: usize = end_of!(Grown, older: u32);
    }

    /// A struct that lies there, as C would have it.
    fn at(words: &mut [usize]) -> *mut Grown {
        words.as_mut_ptr().cast()
    }

    #[test]
    fn a_shorter_struct_is_read_and_filled_in_as_far_as_it_goes() {
        let mut words = [16, 0, 7];
        // SAFETY: it has 16 bytes, and more.
        unsafe {
            assert_eq!(read(at(&mut words)).unwrap(), Grown { size: 16, old: 0, older: 0, new: 0 });
            write(at(&mut words), &Grown { size: 24, old: 1, older: 1, new: 1 }).unwrap();
            assert_eq!(words, [16, 1 << 32 | 1, 7usize]);
            for wrong in [0, 15, LONGEST + 1, usize::MAX] {
                words[0] = wrong;
                assert!(matches!(read(at(&mut words)), Err(Fault::Value { what: "grown->size", .. })), "{wrong}");
                assert!(write(at(&mut words), &Grown { size: 24, old: 1, older: 1, new: 1 }).is_err());
            }
        }
    }

    #[test]
    fn a_longer_struct_must_not_ask_for_what_is_not_known() {
        let mut words = [32, 0, 7, 0];
        // SAFETY: it has 32 bytes.
        unsafe {
            assert_eq!(read(at(&mut words)).unwrap().new, 7);
            words[3] = 1;
            assert!(read(at(&mut words)).unwrap_err().to_string().contains("newer"));
            write(at(&mut words), &Grown { size: 24, old: 0, older: 0, new: 9 }).unwrap();
            assert_eq!(words, [32, 0, 9, 1usize]);
        }
    }
}
