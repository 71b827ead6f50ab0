//! Structs that may grow. A program may have been compiled with another header than this library's:
//! its struct is then shorter or longer. Its first field is its length.

use std::mem::MaybeUninit;

use crate::fault::Fault;
use crate::pointers::pointer;

/// A struct of the header that may get more fields at its end.
///
/// # Safety
///
/// The struct is `repr(C)`, begins with a `usize`, and is valid if all its bytes are zero. `FIRST`
/// is at least the size of its first field, and at most the size of the struct.
pub(crate) unsafe trait Grows: Copy {
    /// The names of a pointer to the struct and of its first field in errors.
    const NAMES: (&'static str, &'static str);
    /// The size of the struct in the first header. Never changes.
    const FIRST: usize;
}

/// The offset of the first byte after a field.
macro_rules! end_of {
    ($type:ty, $field:ident: $of:ty) => {
        std::mem::offset_of!($type, $field) + size_of::<$of>()
    };
}
pub(crate) use end_of;

/// Larger than any struct of this library. A length that was not set may be larger.
const LONGEST: usize = 1 << 16;

/// Reads the caller's struct. A field that it lacks is zero, which means "not set". Bytes that this
/// library does not know must be zero.
///
/// # Safety
///
/// `from` is null, misaligned, or points to as many bytes as its first field says.
pub(crate) unsafe fn read<T: Grows>(from: *const T) -> Result<T, Fault> {
    // SAFETY: passed on.
    let size = unsafe { size_at(from)? };
    let known = size_of::<T>().min(size);
    // SAFETY: passed on: the struct has that many bytes.
    let bytes = unsafe { std::slice::from_raw_parts(from.cast::<MaybeUninit<u8>>(), size) };
    // SAFETY: the bytes beyond are fields of a newer header, which the caller has initialized.
    if bytes[known..].iter().any(|byte| unsafe { byte.assume_init() } != 0) {
        let expected = format!(
            "this kolo knows {known} bytes of it, and what is beyond is not 0; the header is newer than the library: install the library \
             that it came with"
        );
        return Err(Fault::value(T::NAMES.1, size as i64, expected));
    }
    let mut read = MaybeUninit::<T>::zeroed();
    // SAFETY: both structs have that many bytes and do not overlap. Zeros are valid, and so are the
    // caller's fields.
    unsafe {
        std::ptr::copy_nonoverlapping(from.cast::<u8>(), read.as_mut_ptr().cast::<u8>(), known);
        Ok(read.assume_init())
    }
}

/// Fills in the fields of the caller's struct that it has, except its size. Bytes that this library
/// does not know stay as they are.
///
/// # Safety
///
/// As for [`read`], and the struct can be written.
pub(crate) unsafe fn write<T: Grows>(to: *mut T, value: &T) -> Result<(), Fault> {
    // SAFETY: passed on.
    let known = unsafe { size_at(to)? }.min(size_of::<T>());
    let (from, after) = (std::ptr::from_ref(value).cast::<u8>(), size_of::<usize>());
    // SAFETY: both structs have that many bytes and do not overlap.
    unsafe { std::ptr::copy_nonoverlapping(from.add(after), to.cast::<u8>().add(after), known - after) };
    Ok(())
}

/// # Safety
///
/// As for [`read`].
unsafe fn size_at<T: Grows>(at: *const T) -> Result<usize, Fault> {
    pointer(at, T::NAMES.0)?;
    // SAFETY: passed on; every version of the struct begins with its size.
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

    // SAFETY: the struct begins with its size, and numbers may be zero.
    unsafe impl Grows for Grown {
        const NAMES: (&'static str, &'static str) = ("grown", "grown->size");
        const FIRST: usize = end_of!(Grown, older: u32);
    }

    /// Returns the address as that of a struct.
    fn at(words: &mut [usize]) -> *mut Grown {
        words.as_mut_ptr().cast()
    }

    #[test]
    fn a_shorter_struct_is_read_and_filled_in_as_far_as_it_goes() {
        let mut words = [16, 0, 7];
        // SAFETY: the struct has 16 bytes and more.
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
        // SAFETY: the struct has 32 bytes.
        unsafe {
            assert_eq!(read(at(&mut words)).unwrap().new, 7);
            words[3] = 1;
            assert!(read(at(&mut words)).unwrap_err().to_string().contains("newer"));
            write(at(&mut words), &Grown { size: 24, old: 0, older: 0, new: 9 }).unwrap();
            assert_eq!(words, [32, 0, 9, 1usize]);
        }
    }
}
