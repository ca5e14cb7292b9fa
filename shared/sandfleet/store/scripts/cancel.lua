-- Cancel an operation: an unclaimed one is closed and answered, a claimed one is flagged for its node.
-- KEYS  1 prefix
-- ARGV  1 op id
-- Returns the fields of the record, empty if there is none.
--@use time route story reply line use output close
local op = P .. 'op:' .. A[1]
local o = call('HMGET', op, 'state', 'route', 'reply_to')
if o[1] == 'recorded' then
  close_op(A[1], o[2], o[3], now_ms(), 'cancelled', 'the operation was cancelled before it began', '')
elseif o[1] == 'claimed' then
  call('HSET', op, 'cancel', now_ms())
end
return call('HGETALL', op)
