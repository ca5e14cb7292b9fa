-- A route is kept as one text, "sandbox|node|incarnation|epoch", so that comparing it is one comparison.
local function split(route)
  return string.match(route, '^(.-)|(.-)|(.-)|(.*)$')
end
